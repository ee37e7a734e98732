// The audit log and rule diffs: what changed, why, and nothing else.
import { choose, expect, open, RULES, Server, test } from './server';

test('audit rows say what changed and why, and a publish shows its diff', async ({ page }) => {
  const server = await new Server('audited').start();
  try {
    const key = 'audited-0123456789';
    await server.ask('PUT', `/admin/v1/quotas/${key}`, { tier: 'free', reason: 'ticket 1' });
    await server.ask('PUT', `/admin/v1/quotas/${key}`, { tier: 'pro', overrides: [{ descriptor: 'default', requests_per_unit: 50, unit: 'minute' }], reason: 'ticket 2' });
    await server.ask('DELETE', `/admin/v1/quotas/${key}?reason=ticket%203`);
    const files = [{ name: 'rules.yaml', text: RULES.replace('limit: 5/hour', 'limit: 7/hour') }];
    await server.ask('POST', '/admin/v1/rules', { files, reason: 'ticket 4' });
    await server.ask('POST', '/admin/v1/rules/1/rollback', { reason: 'ticket 5' });
    await server.ask('POST', '/admin/v1/emergency', { action: 'tighten', target: { kind: 'tenant', value: 'acme' }, factor: 0.5, reason: 'incident 1' });
    await open(page, server, 'audit');
    const row = (reason: string) => page.getByRole('row').filter({ hasText: reason });
    await expect(row('ticket 2')).toContainText('tier free → pro');
    await expect(row('ticket 2')).toContainText('overrides default 50 / minute');
    await expect(row('ticket 2'), 'what stays is not in it').not.toContainText('key prefix');
    await expect(row('ticket 2').getByRole('cell').nth(4), 'the caller, as lists show it').toHaveText('audi…');
    await expect(row('ticket 2').getByRole('cell').nth(1), 'to the second').toHaveText(/\d\d:\d\d:\d\d$/);
    await expect(row('ticket 3')).toContainText('tier pro removed');
    await expect(row('ticket 4')).toContainText('revision 1 → revision 2');
    await expect(row('ticket 5')).toContainText('rolled back from revision 2 to the rules of revision 1, as revision 3');
    await expect(row('incident 1')).toContainText('target tenant acme');
    await expect(row('incident 1')).toContainText('factor 0.5');

    await row('ticket 4').getByRole('button', { name: /^View diff/ }).click();
    const dialog = page.getByRole('dialog');
    await expect(dialog.getByRole('row').filter({ hasText: 'removed' })).toHaveText(/limit: 5\/hour/);
    await expect(dialog.getByRole('row').filter({ hasText: 'added' })).toHaveText(/limit: 7\/hour/);
    await expect(dialog.locator('mark'), 'only the number is marked').toHaveText(['5', '7']);
    await page.keyboard.press('Escape');
    await row('ticket 2').getByRole('button', { name: /^View change/ }).click();
    await expect(dialog.getByRole('row').filter({ hasText: 'tier' })).toHaveText(/tier\s*free\s*pro/);
  } finally {
    await server.stop();
  }
});

test('the rule diff marks only what changed, before publishing too', async ({ page }) => {
  const server = await new Server('diffed').start();
  try {
    await open(page, server, 'rules?tab=edit');
    await page.getByRole('textbox', { name: /^Rule file/ }).fill(RULES.replace('tiers: {pro: 100/hour}', 'tiers: {pro: 120/hour}'));
    const changes = page.getByRole('region', { name: 'Changes' });
    await expect(changes.locator('del')).toHaveText(['100']);
    await expect(changes.locator('ins')).toHaveText(['120']);
    await expect(changes.locator('mark')).toHaveText(['100', '120']);
    await page.getByRole('button', { name: 'Publish…' }).click();
    const dialog = page.getByRole('dialog');
    await expect(dialog.locator('mark'), 'the dialog shows the diff').toHaveText(['100', '120']);
    await expect(dialog.locator('ins')).toHaveText(['120']);
    await dialog.getByLabel('Reason').fill('ticket 6');
    await dialog.getByRole('button', { name: 'Publish', exact: true }).click();
    await page.getByRole('tab', { name: 'Revisions' }).click();
    await expect(page.getByRole('row').filter({ hasText: 'ticket 6' }).getByRole('cell').nth(1), 'to the second').toHaveText(/\d\d:\d\d:\d\d$/);
  } finally {
    await server.stop();
  }
});

test('a quota is edited and deleted from the menu of its row', async ({ page, server }) => {
  await server.ask('PUT', '/admin/v1/quotas/menu-0123456789', { tier: 'pro', reason: 'ticket 7' });
  await open(page, server, 'quotas');
  const row = page.getByRole('row').filter({ hasText: 'ticket 7' });
  const dialog = page.getByRole('dialog');
  await choose(page, row, 'Edit…');
  await expect(dialog.getByRole('heading', { level: 2 })).toHaveText('Edit quota for men…');
  await page.keyboard.press('Escape');
  await choose(page, row, 'Delete…');
  await dialog.getByRole('button', { name: 'Delete', exact: true }).click();
  await expect(row).toHaveCount(0);
});
