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
}

/**
 * Sends one request. Only the caller's own `signal` makes it reject; everything else is a fault.
 */
export async function post(server: Server, path: string, body: string, timeoutMs: number, signal?: AbortSignal): Promise<Reply> {
  const controller = new AbortController();
  const abort = (): void => controller.abort(signal?.reason);
  if (signal !== undefined) {
    signal.throwIfAborted();
    signal.addEventListener("abort", abort, { once: true });
  }
  let isLate = false;
  const timer = setTimeout(() => {
    isLate = true;
    controller.abort();
  }, timeoutMs);
  try {
    // A redirect is another program: following it would send the token there.
    const init: RequestInit = { method: "POST", headers: server.headers, body, signal: controller.signal, redirect: "manual" };
    const response = await server.fetch(server.url + path, init);
    const text = await readBody(response);
    return text === null ? { fault: "invalid_response" } : { status: response.status, body: text, headers: response.headers };
  } catch {
    if (signal?.aborted === true) throw signal.reason;
    return { fault: isLate ? "timeout" : "unreachable" };
  } finally {
    clearTimeout(timer);
    signal?.removeEventListener("abort", abort);
  }
}

/** The body, or `null` if it is longer than the bound. */
async function readBody(response: Response): Promise<string | null> {
  const length = response.headers.get("content-length");
  if (length !== null && Number(length) <= MAX_BODY_BYTES) return response.text();
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
