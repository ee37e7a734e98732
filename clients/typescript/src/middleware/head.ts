/**
 * The head of a request as it arrived, to be sent to the server. It identifies the caller: a port of its rules was
 * rejected, because they are many, change with its version and settings, and a difference would be a fresh limit.
 */

import type { RequestHead } from "../ratelimit.js";

/** A head whose parts are read when they are needed. */
export interface ReceivedHead {
  readonly method: string;
  readonly target: string;
  /** The address that connected; `undefined` if it is not known. */
  readonly peer: string | null | undefined;
  headers(): RequestHead["headers"];
}

/** What is used of Node's `IncomingMessage` and `Http2ServerRequest`. */
export interface NodeRequest {
  readonly method?: string | undefined;
  readonly url?: string | undefined;
  readonly rawHeaders: readonly string[];
  readonly socket: { readonly remoteAddress?: string | undefined };
}

/** The head of a request of Node's. */
export function nodeHead(request: NodeRequest, target: string | undefined): ReceivedHead {
  return {
    method: request.method ?? "GET",
    target: withoutQuery(target ?? "/"),
    // HTTP/2 has no socket after its connection was closed.
    peer: (request.socket as NodeRequest["socket"] | undefined)?.remoteAddress,
    headers: () => rawFields(request.rawHeaders),
  };
}

/** A query identifies no caller, may hold secrets, and would make each request another one for the deny cache. */
function withoutQuery(target: string): string {
  const at = target.indexOf("?");
  return at < 0 ? target : target.slice(0, at);
}

/** Fields in the order of the message. HTTP/2's pseudo-header fields are no fields; its authority is the host. */
export function rawFields(raw: readonly string[]): RequestHead["headers"] {
  const fields: [string, string][] = [];
  let authority: string | undefined, hasHost = false;
  for (let at = 0; at + 1 < raw.length; at += 2) {
    const name = raw[at] as string, value = raw[at + 1] as string;
    if (name.startsWith(":")) {
      if (name === ":authority") authority = value;
      continue;
    }
    hasHost ||= name.toLowerCase() === "host";
    fields.push([name, value]);
  }
  if (!hasHost && authority !== undefined) fields.push(["host", authority]);
  return fields;
}

/** The head of a `Request`. Its target is the one that the app routes; repeated fields are joined by `, `. */
export function fetchHead(request: Request, peer: string | null | undefined, raw?: readonly string[]): ReceivedHead {
  const { host, pathname } = new URL(request.url);
  return {
    method: request.method,
    target: pathname,
    peer,
    headers: () => {
      if (raw !== undefined) return rawFields(raw);
      const fields = [...request.headers];
      // Some platforms have the host in the URL only.
      if (!request.headers.has("host")) fields.push(["host", host]);
      return fields;
    },
  };
}
