// Light or dark theme: the system's, unless one was chosen.
export type Theme = 'system' | 'light' | 'dark';

const KEY = 'tollgate-theme';
const system = matchMedia('(prefers-color-scheme: dark)');

function stored(): Theme {
  try {
    const choice = localStorage.getItem(KEY);
    return choice === 'light' || choice === 'dark' ? choice : 'system';
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
    // Without storage the choice lasts until the page is closed.
  }
  applyTheme();
}

system.addEventListener('change', applyTheme);
