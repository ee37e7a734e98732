/**
 * Requests to one server, over `fetch` alone, so that the client runs wherever there is one. `fetch` keeps connections
 * by itself. A response is read up to a bound, and within the attempt's time including its body.
 */

import { MAX_BODY_BYTES } from "./answer.js";
import type { Fault } from "./result.js";

/** A complete response, or why there is none. */
export type Reply =
  | { readonly status: number; readonly body: string; readonly headers: Headers }
  | { readonly fault: Fault };

export interface Server {
  /** Without a slash at the end. */
  readonly url: string;
  readonly headers: Record<string, string>;
  readonly fetch: typeof fetch;
  /** Whether its last request got no answer. */
  suspect: boolean;
}

/**
 * Sends one request. Only the caller's own `signal` makes it reject; everything else is a fault.
 *
 * An abort signal costs `fetch` about as much as the rest of this client does. So only requests to a server that did
 * not answer the last one have one that ends them in time. Before that, those that are under way when a server hangs
 * are given up here in time, and ended by the connection's own timeout.
 */
export function post(server: Server, path: string, body: string, timeoutMs: number, signal?: AbortSignal): Promise<Reply> {
  return new Promise((resolve, reject) => {
    signal?.throwIfAborted();
    const controller = signal !== undefined || server.suspect ? new AbortController() : null;
    const finish = (reply: Reply): void => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", abort);
      server.suspect = "fault" in reply;
      resolve(reply);
    };
    const abort = (): void => {
      clearTimeout(timer);
      reject(signal?.reason);
      controller?.abort();
    };
    const timer = setTimeout(() => {
      finish({ fault: "timeout" });
      controller?.abort();
    }, timeoutMs);
    signal?.addEventListener("abort", abort, { once: true });
    // A redirect is another program: following it would send the token there.
    const init: RequestInit = { method: "POST", headers: server.headers, body, redirect: "manual" };
    if (controller !== null) init.signal = controller.signal;
    exchange(server, path, init).then(finish, () => finish({ fault: "unreachable" }));
  });
}

async function exchange(server: Server, path: string, init: RequestInit): Promise<Reply> {
  const response = await server.fetch(server.url + path, init);
  const text = await readBody(response);
  return text === null ? { fault: "invalid_response" } : { status: response.status, body: text, headers: response.headers };
}

/** The body, or `null` if it is longer than the bound. The length of a compressed one says nothing of what it becomes. */
export async function readBody(response: Response): Promise<string | null> {
  const length = response.headers.get("content-length");
  if (length !== null && Number(length) <= MAX_BODY_BYTES && !response.headers.has("content-encoding")) return response.text();
  if (response.body === null) return "";
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let text = "", bytes = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return text + decoder.decode();
    bytes += value.byteLength;
    if (bytes > MAX_BODY_BYTES) {
      reader.cancel().catch(() => undefined);
      return null;
    }
    text += decoder.decode(value, { stream: true });
  }
}
