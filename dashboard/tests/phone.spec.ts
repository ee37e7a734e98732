// A phone: every section is reachable without scrolling sideways, and lists are dense.
import { expect, open, Server, test } from './server';

test.use({ viewport: { width: 390, height: 844 }, hasTouch: true });

test('all sections are reachable', async ({ page, server }) => {
  await open(page, server, 'overview');
  for (const name of ['Rules', 'Quotas', 'Decisions', 'Explain', 'Audit', 'Tokens', 'Emergency', 'Overload', 'Overview']) {
    const entry = page.getByRole('navigation').getByRole('link', { name });
    await expect(entry, name).toBeInViewport({ ratio: 1 });
    await entry.tap();
    await expect(page.getByRole('heading', { level: 1, name })).toBeVisible();
  }
  await expect(page.getByLabel('Theme')).toBeInViewport();
});

test('lists are dense', async ({ page }) => {
  const server = await new Server('dense').start();
  try {
    for (let i = 0; i < 6; i++) await server.exhaust({ api_key: `dense-${i}-0123456789` });
    await server.ask('PUT', '/admin/v1/quotas/dense-0123456789', { tier: 'pro', reason: 'ticket 1' });
    for (const [view, most] of [['overview', 80], ['decisions?verdict=deny', 100], ['quotas', 80], ['audit', 110], ['rules', 80]] as const) {
      await open(page, server, view);
      const rows = page.locator('table.cards tbody tr');
      await expect(rows.first(), view).toBeVisible();
      // The rates widen the rows when they arrive.
      if (view === 'rules') await expect(rows.locator('td.num.deny').first()).not.toHaveText('0');
      const tall = await rows.evaluateAll((all) => all.map((row) => row.getBoundingClientRect().height));
      expect(Math.max(...tall), `${view}: ${tall.join(', ')}`).toBeLessThanOrEqual(most);
      expect(await page.evaluate(() => document.documentElement.scrollWidth), view).toBeLessThanOrEqual(390);
    }
  } finally {
    await server.stop();
  }
});

test('a tap on a chart shows its values until the next tap elsewhere', async ({ page, server }) => {
  await server.check({ api_key: 'tap-0123456789' });
  await open(page, server, 'overview');
  const figure = page.locator('figure').first();
  await expect(async () => {
    await figure.locator('.u-over').tap();
    await expect(figure.getByTestId('crosshair')).toBeVisible({ timeout: 1_000 });
  }).toPass();
  await expect(figure.locator('.when')).toHaveText(/^\d\d:\d\d:\d\d$/);
  await page.getByRole('heading', { level: 1 }).tap();
  await expect(figure.getByTestId('crosshair')).toHaveCount(0);
});
