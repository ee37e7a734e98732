/**
 * Which endpoints have concurrency limits, learned from answers. A permit can only be given back if it was reserved, and
 * a reservation takes a second request to the server, so endpoints without such limits are checked plainly. Endpoints
 * are the server's to tell; here a method and the shape of a path stand for one: `GET /users/*`.
 */

const MAX_ENDPOINTS = 1_024;
const MAX_SEGMENTS = 8;
/** A segment that looks like a name, not like an id. */
const NAME = /^[A-Za-z][A-Za-z_.-]{0,31}$/;

export class Endpoints {
  readonly #known = new Map<string, boolean>();

  /** Whether a request might meet a concurrency limit. One of an unknown endpoint might. */
  mayHold(endpoint: string): boolean {
    return this.#known.get(endpoint) ?? true;
  }

  learn(endpoint: string, concurrent: boolean): void {
    const known = this.#known.get(endpoint);
    // Some callers of an endpoint may have a limit that others do not.
    if (known === true || known === concurrent) return;
    if (known === undefined && this.#known.size >= MAX_ENDPOINTS) {
      const oldest = this.#known.keys().next();
      if (oldest.done !== true) this.#known.delete(oldest.value);
    }
    this.#known.set(endpoint, concurrent);
  }
}

/** The endpoint of a request, for {@link Endpoints}. */
export function endpointOf(method: string, target: string): string {
  const path = target.split(/[?#]/, 1)[0] ?? "";
  const segments = path.split("/", MAX_SEGMENTS + 1).slice(1).map((segment) => (segment === "" || NAME.test(segment) ? segment : "*"));
  // Callers may invent methods, of any length.
  return `${NAME.test(method) ? method : "*"} /${segments.join("/")}`;
}
