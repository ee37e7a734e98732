// What is switched by hand at the moment: all views show it.
import { asProblem, get, type Problem } from './api';
import type { Emergency } from './types';

class Emergencies {
  active = $state.raw<Emergency[]>([]);
  problem = $state.raw<Problem | null>(null);
  loaded = $state(false);

  async load(): Promise<void> {
    try {
      this.active = (await get<{ active: Emergency[] }>('/admin/v1/emergency')).active;
      this.problem = null;
    } catch (error) {
      this.active = [];
      this.problem = asProblem(error);
    }
    this.loaded = true;
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
