/** What is used of Node's `ServerResponse` and `Http2ServerResponse`. */
export interface NodeResponse {
  readonly destroyed?: boolean;
  readonly socket?: { readonly destroyed?: boolean } | null;
  /** HTTP/2. */
  readonly stream?: { readonly destroyed?: boolean };
  on(event: "close", listener: () => void): unknown;
}

/**
 * What a request holds until its response ends, the client leaves or the handler fails, whichever comes first: it is
 * given back exactly once. It may end before the server has answered, since clients leave at any time; what the answer
 * brings is then given back at once.
 */
export class Permit {
  #giveBack: (() => void) | null = null;
  #ended = false;

  /** Ends when a response of Node's is closed. To be made before the check: the client may leave while it is under way. */
  static of(response: NodeResponse): Permit {
    const permit = new Permit();
    // Its event may have passed already, in an earlier middleware; a closed socket still has it before it.
    if (response.destroyed === true || response.stream?.destroyed === true || response.socket?.destroyed === true) permit.end();
    else response.on("close", () => permit.end());
    return permit;
  }

  /** Whether the request is over. */
  get ended(): boolean {
    return this.#ended;
  }

  /** Whether there is something to give back. */
  get held(): boolean {
    return this.#giveBack !== null;
  }

  hold(giveBack: () => void): void {
    if (this.#ended) giveBack();
    else this.#giveBack = giveBack;
  }

  end(): void {
    this.#ended = true;
    const giveBack = this.#giveBack;
    this.#giveBack = null;
    giveBack?.();
  }

  /** Ends when a signal is aborted: the client has left. */
  endWith(signal: AbortSignal | null | undefined): void {
    if (signal?.aborted === true) this.end();
    else signal?.addEventListener("abort", () => this.end(), { once: true });
  }

  /** Ends with a body: when it has been read to its end, or is given up. */
  endAfter(body: ReadableStream<Uint8Array> | null): ReadableStream<Uint8Array> | null {
    if (body === null) {
      this.end();
      return null;
    }
    const reader = body.getReader();
    return new ReadableStream<Uint8Array>({
      pull: async (controller) => {
        try {
          const { done, value } = await reader.read();
          if (!done) return controller.enqueue(value);
          this.end();
          controller.close();
        } catch (error) {
          this.end();
          controller.error(error);
        }
      },
      cancel: (reason) => {
        this.end();
        return reader.cancel(reason);
      },
    }, { highWaterMark: 0 });
  }
}
