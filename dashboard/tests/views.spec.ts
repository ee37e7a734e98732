// Every view, narrow and wide, light and dark, by keyboard alone.
import { expect, open, Server, test } from './server';

const VIEWS = ['overview', 'rules', 'rules?tab=edit', 'rules?tab=history', 'quotas', 'decisions', 'explain', 'explain?attr.endpoint=POST+%2Flogin', 'audit', 'tokens', 'emergency', 'overload', 'rule?domain=sample&rule=per-key', 'caller?id=0123456789abcdef', 'overview?range=7d'];

for (const width of [360, 1920]) {
  for (const scheme of ['light', 'dark'] as const) {
    test(`every view at ${width} px, ${scheme}`, async ({ page, server }) => {
      await page.setViewportSize({ width, height: width < 500 ? 740 : 1080 });
      await page.emulateMedia({ colorScheme: scheme });
      for (const view of VIEWS) {
        await open(page, server, view);
        await expect(page.getByText('Loading…')).toHaveCount(0);
        await expect(page.locator('html')).toHaveAttribute('data-theme', scheme);
        await expect(page.getByText(/^This server does not support/), view).toHaveCount(0);
        await expect(page.getByRole('alert'), view).toHaveCount(0);
        const over = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
        expect(over, `${view} does not scroll sideways`).toBeLessThanOrEqual(0);
      }
    });
  }
}

test('with no traffic it shows no traffic and says what to do', async ({ page }) => {
  const server = await new Server('quiet').start();
  try {
    await open(page, server, 'overview');
    await expect(page.getByText('No traffic in this period.')).toBeVisible();
    await expect(page.getByText('No denials')).toBeVisible();
    await open(page, server, 'quotas');
    await expect(page.getByText('No quotas yet')).toBeVisible();
    await open(page, server, 'emergency');
    await expect(page.getByText('No active measures')).toBeVisible();
  } finally {
    await server.stop();
  }
});

test('the theme is chosen and remembered', async ({ page, server }) => {
  await page.emulateMedia({ colorScheme: 'light' });
  await open(page, server, 'overview');
  const color = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const light = await color();
  await page.getByLabel('Theme').selectOption('Dark');
  await expect(page.locator('html')).toHaveAttribute('data-theme', 'dark');
  expect(await color()).not.toBe(light);
  await page.reload();
  await expect(page.locator('html')).toHaveAttribute('data-theme', 'dark');
});

test('it is used by keyboard alone', async ({ page, server }) => {
  await open(page, server, 'quotas');
  await page.keyboard.press('Tab');
  await expect(page.getByRole('link', { name: 'Skip to content' })).toBeFocused();
  await page.keyboard.press('Enter');
  await expect(page.locator('main')).toBeFocused();
  await page.keyboard.press('Tab');
  const opener = page.getByRole('button', { name: 'Set quota…' });
  await expect(opener).toBeFocused();
  const outlined = await opener.evaluate((button) => getComputedStyle(button).outlineStyle);
  expect(outlined, 'the focus is visible').toBe('solid');
  await page.keyboard.press('Enter');
  const dialog = page.getByRole('dialog');
  await expect(dialog).toBeVisible();
  // The focus stays in the dialog, however far it is moved; the browser's own frame apart.
  for (let i = 0; i < 30; i++) {
    await page.keyboard.press('Tab');
    expect(await page.evaluate(() => document.activeElement === document.body || document.activeElement?.closest('dialog') !== null)).toBe(true);
  }
  await page.keyboard.press('Escape');
  await expect(dialog).toHaveCount(0);
  await expect(opener).toBeFocused();

  await open(page, server, 'rules');
  await page.getByRole('tab', { name: 'Active' }).focus();
  await page.keyboard.press('ArrowRight');
  await expect(page.getByRole('tab', { name: 'Editor' })).toBeFocused();
  await expect(page.getByRole('textbox', { name: /^Rule file/ })).toBeVisible();
});

test('the page is guarded by headers', async ({ request, server }) => {
  const page = await request.get(server.admin + '/');
  expect(page.headers()['content-security-policy']).toMatch(/^default-src 'self';/);
  expect(page.headers()['cache-control']).toBe('no-cache');
  const name = /\/assets\/[^"]+\.js/.exec(await page.text())?.[0];
  const script = await request.get(server.admin + name);
  expect(script.headers()['cache-control']).toContain('immutable');
  expect((await request.get(server.admin + '/assets/other.js')).status()).toBe(404);
});
