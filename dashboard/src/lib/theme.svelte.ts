// Light or dark: as the system says, unless somebody has chosen here.
export type Theme = 'system' | 'light' | 'dark';

const KEY = 'tollgate-theme';
const system = matchMedia('(prefers-color-scheme: dark)');

function stored(): Theme {
  try {
    const said = localStorage.getItem(KEY);
    return said === 'light' || said === 'dark' ? said : 'system';
  } catch {
    return 'system';
  }
}

export const theme = $state({ choice: stored(), dark: false });

export function applyTheme(): void {
  theme.dark = theme.choice === 'system' ? system.matches : theme.choice === 'dark';
  document.documentElement.dataset.theme = theme.dark ? 'dark' : 'light';
}

export function chooseTheme(choice: Theme): void {
  theme.choice = choice;
  try {
    if (choice === 'system') localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, choice);
  } catch {
    // A browser that keeps nothing forgets the choice.
  }
  applyTheme();
}

system.addEventListener('change', applyTheme);
