// Rules that somebody has written and not published: kept over other views, a reload and a log-in, until they act or are given up.
// Of this tab alone, and of one person: whoever logs in after them does not find it.
import type { RuleFile } from './types';

/** What acted when writing began. */
export interface Base {
  files: RuleFile[];
  rev: number | null;
  revision: string;
}

export interface Draft {
  files: RuleFile[];
  base: Base;
  /** Who wrote it, and when last. */
  by: string;
  at: string;
}

const NAME = 'tollgate.draft';
/** It is written down when nothing was written for so long, in milliseconds. */
const PAUSE = 500;

function isDraft(value: unknown): value is Draft {
  const draft = value as Draft | null;
  const isFiles = (files: unknown) => Array.isArray(files) && files.every((file: RuleFile | null) => typeof file?.name === 'string' && typeof file.text === 'string');
  return isFiles(draft?.files) && isFiles(draft?.base?.files) && typeof draft?.by === 'string' && typeof draft.at === 'string';
}

class Drafts {
  current = $state.raw<Draft | null>(null);
  /** Whether a reload would lose it: too large for what a browser keeps. */
  isTooLarge = $state(false);
  private timer: ReturnType<typeof setTimeout> | null = null;

  constructor() {
    try {
      const kept: unknown = JSON.parse(sessionStorage.getItem(NAME) ?? 'null');
      if (isDraft(kept)) this.current = kept;
    } catch {
      // Nothing that can be read: nothing is kept.
    }
    addEventListener('pagehide', () => this.write());
    addEventListener('beforeunload', (event) => {
      if (!this.current) return;
      this.write();
      event.preventDefault();
    });
  }

  /** What this person has written, if anything. */
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
      // The one before is not what was written last.
      sessionStorage.removeItem(NAME);
      this.isTooLarge = this.current !== null;
    }
  }
}

export const drafts = new Drafts();
