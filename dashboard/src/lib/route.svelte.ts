// The current view and its parameters, from the fragment of the address: #/decisions?verdict=deny
export const VIEWS = ['overview', 'rules', 'quotas', 'decisions', 'explain', 'audit', 'tokens', 'emergency', 'overload', 'rule', 'caller'] as const;
export type View = (typeof VIEWS)[number];

class Route {
  view = $state<View>('overview');
  words = $state.raw(new URLSearchParams());
  /** The range that the overview had last. */
  overview = $state.raw<Record<string, string>>({});

  constructor() {
    this.read();
    addEventListener('hashchange', () => this.read());
  }

  private read(): void {
    const [name = '', words = ''] = location.hash.replace(/^#\/?/, '').split('?');
    this.view = VIEWS.find((view) => view === name) ?? 'overview';
    this.set(new URLSearchParams(words));
  }

  private set(words: URLSearchParams): void {
    this.words = words;
    if (this.view === 'overview') this.overview = Object.fromEntries(words);
  }

  /** Replaces the parameters of this view without a history entry. */
  replace(words: Record<string, string>): void {
    const set = new URLSearchParams(Object.entries(words).filter(([, value]) => value !== ''));
    const text = set.toString();
    history.replaceState(null, '', `#/${this.view}${text ? `?${text}` : ''}`);
    this.set(set);
  }

  /** Sets some parameters of this view, with a history entry: “back” undoes it. */
  push(words: Record<string, string>): void {
    const set = Object.entries({ ...Object.fromEntries(this.words), ...words }).filter(([, value]) => value !== '');
    location.hash = link(this.view, Object.fromEntries(set));
  }
}

export const route = new Route();

export function link(view: View, words: Record<string, string> = {}): string {
  const text = new URLSearchParams(words).toString();
  return `#/${view}${text ? `?${text}` : ''}`;
}

/** The page of a rule. */
export function ruleLink(domain: string, rule: string): string {
  return link('rule', { domain, rule });
}

/** The page of a caller. */
export function callerLink(id: string): string {
  return link('caller', { id });
}
