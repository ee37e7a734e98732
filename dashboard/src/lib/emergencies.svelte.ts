// What is switched by hand at the moment: all views show it.
import { asProblem, get, type Problem } from './api';
import type { Emergency } from './types';

class Emergencies {
  active = $state.raw<Emergency[]>([]);
  problem = $state.raw<Problem | null>(null);
  loaded = $state(false);
  /** When the list was last told, if ever. */
  updatedAt = $state<string | null>(null);

  async load(): Promise<void> {
    try {
      this.active = (await get<{ active: Emergency[] }>('/admin/v1/emergency')).active;
      this.updatedAt = new Date().toISOString();
      this.problem = null;
    } catch (error) {
      const problem = asProblem(error);
      // What was told last goes on being shown until it ends by itself: one request that fails switches nothing off.
      this.active = problem.isMissing ? [] : this.active.filter((one) => new Date(one.expires_at).getTime() > Date.now());
      this.problem = problem;
    }
    this.loaded = true;
  }

  /** Whether what is shown is what was last known, and no more. */
  get isStale(): boolean {
    return this.problem !== null && this.updatedAt !== null;
  }
}

export const emergencies = new Emergencies();

export const ACTIONS: Record<string, string> = {
  block: 'Block',
  tighten: 'Tighten',
  exempt: 'Exempt',
  disable_rule: 'Switch a rule off',
  allow_all: 'Let everything pass',
  shadow_all: 'Deny nothing, count only',
};

export function inWords(one: Emergency): string {
  const whom = one.target && one.target.kind !== 'all' ? `${one.target.kind.replace('_', ' ')} ${one.target.value ?? ''}`.trim() : '';
  switch (one.action) {
    case 'block':
      return `Blocked: ${whom || 'everything'}`;
    case 'tighten':
      return `Limits${whom ? ` of ${whom}` : ''} tightened to ${one.factor === null || one.factor === undefined ? 'a part' : `${Math.round(one.factor * 100)}%`}`;
    case 'exempt':
      return `Exempt from limits: ${whom || 'everything'}`;
    case 'disable_rule':
      return `Rule off: ${one.target?.value ?? ''}`;
    case 'allow_all':
      return 'Everything passes';
    case 'shadow_all':
      return 'Nothing is denied, only counted';
  }
}
