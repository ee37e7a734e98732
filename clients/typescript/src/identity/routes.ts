/** The endpoint of a request as a template: `/users/1` and `/users/2` are both `GET /users/{id}`, one counter. */

const METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"];
const OTHER = "OTHER";
const MAX_SEGMENTS = 64;

interface End {
  readonly endpoint: string;
  readonly namesMethod: boolean;
}

class Node {
  readonly literals = new Map<string, Node>();
  any: Node | null = null;
  readonly ends = new Map<string, End>();
  readonly rest = new Map<string, End>();
}

export class Routes {
  readonly #root = new Node();
  readonly #methods = new Set(METHODS);

  constructor(routes: readonly string[], private readonly unmatched: "other" | "path") {
    const parsed = routes.map(parseRoute);
    for (const { method } of parsed) if (method !== null) this.#methods.add(method);
    for (const route of parsed) this.#add(route);
  }

  method(method: string): string {
    return this.#methods.has(method) ? method : OTHER;
  }

  /** `method` is one that {@link method} returned, `path` is normalized. */
  endpoint(method: string, path: string): string {
    const segments = path.split("/").filter((segment) => segment !== "");
    return find(this.#root, method, segments, 0) ?? (this.unmatched === "other" ? `${method} other` : `${method} ${path}`);
  }

  #add({ route, method, path }: Route): void {
    let node = this.#root, takesRest = false;
    const segments = path.split("/").filter((segment) => segment !== "");
    if (segments.length > MAX_SEGMENTS) throw new TypeError(`route ${route}: a path has at most ${MAX_SEGMENTS} segments`);
    for (const [at, segment] of segments.entries()) {
      const name = /^\{([^{}]+)\}$/.exec(segment)?.[1];
      if (name?.startsWith("*") === true) {
        if (at + 1 < segments.length) throw new TypeError(`route ${route}: ${segment} matches the rest of the path, so it must be the last segment`);
        takesRest = true;
      } else if (name !== undefined) {
        node = node.any ??= new Node();
      } else if (/[{}*?#%;]/.test(segment)) {
        throw new TypeError(`route ${route}: invalid segment ${segment}; write users, {id}, or {*rest} at the end`);
      } else {
        let next = node.literals.get(segment);
        if (next === undefined) node.literals.set(segment, (next = new Node()));
        node = next;
      }
    }
    const ends = takesRest ? node.rest : node.ends;
    for (const one of method === null ? [...this.#methods, OTHER] : [method]) {
      const known = ends.get(one);
      const namesMethod = method !== null;
      if (known?.namesMethod === namesMethod) throw new TypeError(`route ${route}: ${known.endpoint} matches the same requests; remove one of them`);
      if (known === undefined || namesMethod) ends.set(one, { endpoint: `${one} ${path}`, namesMethod });
    }
  }
}

interface Route {
  readonly route: string;
  readonly method: string | null;
  readonly path: string;
}

function parseRoute(route: string): Route {
  const match = /^(?:([A-Z-]+) +)?(\/.*)$/.exec(route.trim());
  if (match === null) throw new TypeError(`route ${route}: write /path, or GET /path`);
  return { route, method: match[1] ?? null, path: match[2] as string };
}

/** A literal segment wins over a parameter, which wins over the rest of a path. */
function find(node: Node, method: string, segments: readonly string[], depth: number): string | null {
  const segment = segments[depth];
  if (segment === undefined) return node.ends.get(method)?.endpoint ?? null;
  if (depth > MAX_SEGMENTS) return null;
  const literal = node.literals.get(segment);
  const found = literal === undefined ? null : find(literal, method, segments, depth + 1);
  if (found !== null) return found;
  const any = node.any === null ? null : find(node.any, method, segments, depth + 1);
  return any ?? node.rest.get(method)?.endpoint ?? null;
}
