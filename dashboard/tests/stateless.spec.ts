// Without a control-plane database: nothing is offered that cannot work, and the rule text is read-only.
import { expect, open, RULES, Server, test } from './server';

test('without a database only what works is offered', async ({ page }) => {
  const server = new Server('stateless');
  server.isStateless = true;
  await server.start();
  try {
    await server.exhaust({ api_key: 'stateless-0123456789' });
    const failed: string[] = [];
    page.on('response', (response) => {
      if (response.status() >= 400) failed.push(`${response.status()} ${response.url()}`);
    });
    await open(page, server, 'overview');
    await expect(page.getByRole('navigation').getByRole('link')).toHaveText(['Overview', 'Rules', 'Decisions', 'Explain', 'Overload']);
    const row = page.getByRole('region', { name: 'Top denied callers' }).getByRole('row').filter({ hasText: 'per-key' });
    await row.getByRole('button', { name: /^Actions for/ }).click();
    await expect(page.getByRole('menuitem')).toHaveText(['Explain denial', 'Usage']);
    await page.getByRole('menuitem', { name: 'Explain denial' }).click();
    const dialog = page.getByRole('dialog');
    await expect(dialog).toContainText('Denied by rule per-key');
    await expect(dialog.getByRole('button', { name: /Override/ })).toHaveCount(0);
    await page.keyboard.press('Escape');
    await row.getByRole('button', { name: /^Actions for/ }).click();
    await page.getByRole('menuitem', { name: 'Usage' }).click();
    await expect(dialog.getByRole('row').filter({ hasText: 'per-key' })).toContainText('5 / 1h');
    await expect(dialog.getByRole('button', { name: /Grant|Reset/ })).toHaveCount(0);
    await page.keyboard.press('Escape');

    await page.getByRole('link', { name: 'Rules' }).click();
    await expect(page.getByRole('tab')).toHaveText(['Active', 'Files']);
    await page.getByRole('button', { name: 'Open logins in editor' }).click();
    const text = page.getByRole('textbox', { name: /^Rule file/ });
    await expect(text).toHaveValue(RULES);
    await expect(text).not.toBeEditable();
    const line = await text.evaluate((area: HTMLTextAreaElement) => area.value.slice(0, area.selectionStart).split('\n').length);
    expect(line, 'the rule is shown').toBeGreaterThan(8);
    await expect(page.getByRole('button', { name: /Publish/ })).toHaveCount(0);
    for (const view of ['quotas', 'audit', 'emergency']) {
      await open(page, server, view);
      await expect(page.getByText('No database.')).toBeVisible();
      await expect(page.getByRole('main').getByRole('button')).toHaveCount(0);
    }
    expect(failed, 'nothing is requested that cannot work').toEqual([]);
  } finally {
    await server.stop();
  }
});
