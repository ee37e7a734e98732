// Active emergency measures, which every view shows.
import { asProblem, get, type Problem } from './api';
import type { Emergency } from './types';

class Emergencies {
  active = $state.raw<Emergency[]>([]);
  problem = $state.raw<Problem | null>(null);
  loaded = $state(false);
  /** When the list was last read, if ever. */
  updatedAt = $state<string | null>(null);

  async load(): Promise<void> {
    try {
      this.active = (await get<{ active: Emergency[] }>('/admin/v1/emergency')).active;
      this.updatedAt = new Date().toISOString();
      this.problem = null;
    } catch (error) {
      const problem = asProblem(error);
      // A failed request ends no measure: the last known ones stay until they expire.
      this.active = problem.isMissing ? [] : this.active.filter((one) => one.expires_at === null || new Date(one.expires_at).getTime() > Date.now());
      this.problem = problem;
    }
    this.loaded = true;
  }

  /** Those that expire. What is permanent is the usual state, and no reason to warn in every view. */
  get temporary(): (Emergency & { expires_at: string })[] {
    return this.active.filter((one): one is Emergency & { expires_at: string } => one.expires_at !== null);
  }

  /** Whether the list may be out of date. */
  get isStale(): boolean {
    return this.problem !== null && this.updatedAt !== null;
  }
}

export const emergencies = new Emergencies();

export const ACTIONS: Record<string, string> = {
  block: 'Block',
  tighten: 'Tighten',
  exempt: 'Exempt',
  disable_rule: 'Disable rule',
  allow_all: 'Allow all (kill switch)',
  shadow_all: 'Shadow all',
};

export function inWords(one: Emergency): string {
  const whom = one.target && one.target.kind !== 'all' ? `${one.target.key ?? one.target.kind.replace('_', ' ')} ${one.target.value ?? ''}`.trim() : '';
  switch (one.action) {
    case 'block':
      return `Blocked: ${whom || 'all traffic'}`;
    case 'tighten':
      return `Limits${whom ? ` of ${whom}` : ''} tightened to ${one.factor === null || one.factor === undefined ? 'a fraction' : `${Math.round(one.factor * 100)}%`}`;
    case 'exempt':
      return `Exempt from limits: ${whom || 'all traffic'}`;
    case 'disable_rule':
      return `Rule disabled: ${one.target?.value ?? ''}`;
    case 'allow_all':
      return 'All requests allowed';
    case 'shadow_all':
      return 'All rules in shadow mode';
  }
}
