// Unpublished rule edits, kept per tab and per principal across views, reloads and logins, until they are published or discarded.
import type { RuleFile } from './types';

/** The rules that were active when editing began. */
export interface Base {
  files: RuleFile[];
  rev: number | null;
  revision: string;
}

export interface Draft {
  files: RuleFile[];
  base: Base;
  /** The author, and the time of the last edit. */
  by: string;
  at: string;
}

const NAME = 'tollgate.draft';
/** Delay before a draft is stored, in milliseconds. */
const PAUSE = 500;

function isDraft(value: unknown): value is Draft {
  const draft = value as Draft | null;
  const isFiles = (files: unknown) => Array.isArray(files) && files.every((file: RuleFile | null) => typeof file?.name === 'string' && typeof file.text === 'string');
  return isFiles(draft?.files) && isFiles(draft?.base?.files) && typeof draft?.by === 'string' && typeof draft.at === 'string';
}

class Drafts {
  current = $state.raw<Draft | null>(null);
  /** Whether the draft is too large for session storage, so that a reload would lose it. */
  isTooLarge = $state(false);
  private timer: ReturnType<typeof setTimeout> | null = null;

  constructor() {
    try {
      const kept: unknown = JSON.parse(sessionStorage.getItem(NAME) ?? 'null');
      if (isDraft(kept)) this.current = kept;
    } catch {
      // An unreadable draft is ignored.
    }
    addEventListener('pagehide', () => this.write());
    addEventListener('beforeunload', (event) => {
      if (!this.current) return;
      this.write();
      event.preventDefault();
    });
  }

  /** The draft of this principal, if any. */
  of(name: string | null | undefined): Draft | null {
    return this.current && this.current.by === (name ?? '') ? this.current : null;
  }

  keep(draft: Draft): void {
    this.current = draft;
    if (this.timer === null) this.timer = setTimeout(() => this.write(), PAUSE);
  }

  drop(name: string | null | undefined): void {
    if (this.of(name) === null) return;
    this.current = null;
    this.write();
  }

  private write(): void {
    if (this.timer !== null) clearTimeout(this.timer);
    this.timer = null;
    try {
      if (this.current) sessionStorage.setItem(NAME, JSON.stringify(this.current));
      else sessionStorage.removeItem(NAME);
      this.isTooLarge = false;
    } catch {
      // An older version must not be restored in its place.
      sessionStorage.removeItem(NAME);
      this.isTooLarge = this.current !== null;
    }
  }
}

export const drafts = new Drafts();
