/**
 * Identity: a request's attributes (address, API key, endpoint) from its head, by the gateway's rules
 * (docs/deployment/identity.md), so that a service behind the middleware and one behind the gateway share counters. A
 * header counts only if the peer that sent it is trusted, unless it is the caller's own choice (its API key). JSON Web
 * Tokens are left to the service, which verifies them anyway: pass their user as an attribute.
 */

import { contains, formatAddress, parseAddress, parseHop, parseNetwork, truncate, type Address, type Network } from "./address.js";
import { normalizeHost, normalizePath, pathOfTarget } from "./path.js";
import { Routes } from "./routes.js";
import { sha256 } from "./sha256.js";

export interface IdentitySettings {
  /** Proxies whose headers count: addresses and networks. Default: loopback. */
  readonly trusted?: readonly string[];
  /** Which header names the client behind a trusted proxy. Default `x-forwarded-for`. */
  readonly forwarded?: "x-forwarded-for" | "forwarded" | "none";
  /** Bits of an IPv6 address that identify a caller. Default 64. */
  readonly ipv6Prefix?: number;
  /** Where API keys are: a header (or `null`), and `Authorization: Bearer`. */
  readonly apiKey?: { readonly header?: string | null; readonly bearer?: boolean };
  /** Templates of endpoints: `GET /users/{id}`, `/files/{*rest}`. */
  readonly routes?: readonly string[];
  /** The endpoint of a path without a route: `GET other` (default), or the path itself. */
  readonly unmatched?: "other" | "path";
  /** More attributes from headers of anyone: attribute to header name. */
  readonly headers?: Readonly<Record<string, string>>;
  /** The same, from trusted peers only. */
  readonly trustedHeaders?: Readonly<Record<string, string>>;
}

/** The head of a request. */
export interface RequestHead {
  readonly method: string;
  /** Path with query, or a URL. */
  readonly target: string;
  /** The peer's address; absent where the platform does not tell (then nothing is trusted). */
  readonly peer?: string | undefined;
  /** Every line of a field, by its lower-case name. */
  readonly lines: (name: string) => readonly string[];
  /** Whether `lines` returns several lines joined by `, `, as `Headers` does. Two keys in one line are then two keys. */
  readonly joined?: boolean;
}

/** The request names two callers. Respond 400: one of them might be invented, for a fresh limit. */
export class AmbiguousIdentityError extends Error {
  override readonly name = "AmbiguousIdentityError";
}

const MAX_HOPS = 64;
const MAX_VALUE = 256;
const MAX_KEY = 512;
const BUILT_IN = ["remote_address", "endpoint", "method", "path", "host", "api_key", "global"];

export class Identity {
  readonly #trusted: readonly Network[];
  readonly #forwarded: "x-forwarded-for" | "forwarded" | "none";
  readonly #prefix: number;
  readonly #keyHeader: string | null;
  readonly #bearer: boolean;
  readonly #routes: Routes;
  readonly #mapped: readonly { readonly attribute: string; readonly header: string; readonly onlyTrusted: boolean }[];

  constructor(settings: IdentitySettings = {}) {
    this.#trusted = (settings.trusted ?? ["127.0.0.1", "::1"]).map((text) => {
      const network = parseNetwork(text);
      if (network === null) throw new TypeError(`invalid network ${text}; write 10.0.0.0/8, 2001:db8::/32 or an address`);
      return network;
    });
    this.#forwarded = settings.forwarded ?? "x-forwarded-for";
    this.#prefix = settings.ipv6Prefix ?? 64;
    if (!(this.#prefix >= 1 && this.#prefix <= 128)) throw new TypeError(`invalid ipv6Prefix ${this.#prefix}; write 1 to 128`);
    this.#keyHeader = settings.apiKey?.header === undefined ? "x-api-key" : (settings.apiKey.header?.toLowerCase() ?? null);
    this.#bearer = settings.apiKey?.bearer ?? true;
    this.#routes = new Routes(settings.routes ?? [], settings.unmatched ?? "other");
    const mapped = (map: Readonly<Record<string, string>> | undefined, onlyTrusted: boolean) =>
      Object.entries(map ?? {}).map(([attribute, header]) => {
        if (BUILT_IN.includes(attribute)) throw new TypeError(`${attribute} is a built-in attribute; choose another name`);
        return { attribute, header: header.toLowerCase(), onlyTrusted };
      });
    this.#mapped = [...mapped(settings.trustedHeaders, true), ...mapped(settings.headers, false)];
  }

  /** The attributes of a request; throws {@link AmbiguousIdentityError} if it names two callers. */
  attributes(request: RequestHead): Record<string, string> {
    const peer = request.peer === undefined ? null : parseAddress(request.peer);
    const isTrusted = peer !== null && this.#trusts(peer);
    const attributes: Record<string, string> = {};
    const add = (name: string, value: string): void => { if (!(name in attributes)) attributes[name] = bounded(value, MAX_VALUE); };
    if (peer !== null) add("remote_address", this.#addressText(isTrusted ? this.#client(peer, request) : peer));
    const method = this.#routes.method(request.method);
    const path = normalizePath(pathOfTarget(request.target));
    add("endpoint", this.#routes.endpoint(method, path));
    add("method", method);
    add("path", path);
    const host = request.lines("host")[0];
    if (host !== undefined && isVisible(host)) add("host", normalizeHost(host));
    const key = this.#apiKey(request);
    if (key !== null) attributes["api_key"] = bounded(key, MAX_KEY);
    for (const { attribute, header, onlyTrusted } of this.#mapped) {
      const value = isTrusted || !onlyTrusted ? request.lines(header).at(-1) : undefined;
      if (value !== undefined) add(attribute, text(value));
    }
    return attributes;
  }

  #trusts(address: Address): boolean {
    return this.#trusted.some((network) => contains(network, address));
  }

  #addressText(address: Address): string {
    return formatAddress(address.length === 16 ? truncate(address, this.#prefix) : address);
  }

  /** The rightmost address that is not trusted; an entry that is none ends the search. */
  #client(peer: Address, request: RequestHead): Address {
    if (this.#forwarded === "none") return peer;
    const lines = request.lines(this.#forwarded);
    const hops = lines.flatMap((line) => (this.#forwarded === "forwarded" ? forwardedFor(line) : line.split(",").map(parseHop)));
    let client = peer;
    for (const hop of hops.reverse().slice(0, MAX_HOPS)) {
      if (hop === null) return client;
      client = hop;
      if (!this.#trusts(client)) return client;
    }
    return client;
  }

  #apiKey(request: RequestHead): string | null {
    let key: string | null = null;
    const only = (value: string, what: string): void => {
      if (key !== null && key !== value) throw new AmbiguousIdentityError(`${what} contain different API keys; send one of them`);
      key = value;
    };
    if (this.#keyHeader !== null) {
      for (const line of credentials(request, this.#keyHeader)) {
        const value = line.trim();
        if (value !== "") only(value, `two \`${this.#keyHeader}\` fields`);
      }
    }
    if (this.#bearer) {
      for (const line of credentials(request, "authorization")) {
        const value = /^bearer (.*)$/i.exec(line)?.[1]?.trim();
        if (value !== undefined && value !== "") only(value, `\`${this.#keyHeader ?? "authorization"}\` and \`authorization\``);
      }
    }
    return key === null ? null : text(key);
  }
}

function credentials(request: RequestHead, name: string): readonly string[] {
  const lines = request.lines(name);
  return request.joined === true ? lines.flatMap((line) => line.split(/, */)) : lines;
}

/** The `for` of each element of a `Forwarded` field (RFC 7239). */
function forwardedFor(line: string): (Address | null)[] {
  if (!isVisible(line)) return [null];
  return splitOutsideQuotes(line, ",").map((element) => {
    for (const pair of splitOutsideQuotes(element, ";")) {
      const at = pair.indexOf("=");
      if (at < 0 || pair.slice(0, at).trim().toLowerCase() !== "for") continue;
      const value = pair.slice(at + 1).trim();
      return parseHop(/^"(.*)"$/.exec(value)?.[1] ?? value);
    }
    return null;
  });
}

function splitOutsideQuotes(line: string, separator: string): string[] {
  const parts: string[] = [];
  let start = 0, quoted = false;
  for (let at = 0; at < line.length; at += 1) {
    const char = line[at];
    if (quoted && char === "\\") at += 1;
    else if (char === '"') quoted = !quoted;
    else if (!quoted && char === separator) {
      parts.push(line.slice(start, at));
      start = at + 1;
    }
  }
  parts.push(line.slice(start));
  return parts;
}

function isVisible(value: string): boolean {
  return /^[\x20-\x7e\t]*$/.test(value);
}

/** Header values arrive as one character a byte; most are UTF-8. */
function text(value: string): string {
  if (isVisible(value)) return value;
  const bytes = Uint8Array.from(value, (char) => char.charCodeAt(0));
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    return hashed(bytes);
  }
}

function bounded(value: string, max: number): string {
  const bytes = new TextEncoder().encode(value);
  return bytes.length <= max ? value : hashed(bytes);
}

function hashed(bytes: Uint8Array): string {
  return `sha256:${Array.from(sha256(bytes).subarray(0, 16), (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}
