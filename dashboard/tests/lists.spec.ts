// Lists that stay as they were read, words that are true, and a focus that is given back.
import { expect, open, RULES, Server, test } from './server';

/** The sample rules with another limit, as files to publish. */
const files = (limit: string) => [{ name: 'rules.yaml', text: RULES.replace('limit: 5/hour', `limit: ${limit}`) }];

test('revisions offer what can be done with them, by this person', async ({ page }) => {
  const server = await new Server().start();
  try {
    for (let caller = 0; caller < 5; caller++) for (let i = 0; i < 4; i++) await server.check({ api_key: `caller-${caller}-0123456789` });
    // It denies so much that another person has to approve of it.
    await server.ask('POST', '/admin/v1/rules', { files: files('1/hour'), reason: 'ticket 1', confirm: true });
    await open(page, server, 'rules?tab=history');
    const row = page.getByRole('row').filter({ hasText: 'ticket 1' });
    await expect(row).toContainText("needs another operator's approval");
    await expect(row.getByRole('button', { name: 'Approve' })).toHaveCount(0);
    await server.ask('POST', '/admin/v1/rules', { files: files('7/hour'), reason: 'ticket 2' });
    await expect(row).toContainText('rejected');
    await expect(row.getByRole('button', { name: /^Roll back/ }), 'it has never acted').toHaveCount(0);
    await expect(row.getByRole('button', { name: /^Compare/ })).toBeVisible();
    await expect(page.getByRole('button', { name: /^Roll back/ }), 'what acted first').toHaveCount(1);
  } finally {
    await server.stop();
  }
});

test('another person may approve', async ({ page }) => {
  const server = await new Server().start();
  try {
    for (let caller = 0; caller < 5; caller++) for (let i = 0; i < 4; i++) await server.check({ api_key: `caller-${caller}-0123456789` });
    await server.ask('POST', '/admin/v1/rules', { files: files('1/hour'), reason: 'ticket 3', confirm: true });
    const token = server.token('olga', 'operator');
    await page.goto(`${server.admin}/#/rules?tab=history`);
    await page.getByLabel('Token').fill(token);
    await page.keyboard.press('Enter');
    const row = page.getByRole('row').filter({ hasText: 'ticket 3' });
    await row.getByRole('button', { name: 'Approve' }).click();
    await expect(row).toContainText('active');
    await expect(row).toContainText('approved by olga');
  } finally {
    await server.stop();
  }
});

test('all revisions can be seen', async ({ page }) => {
  const server = await new Server().start();
  try {
    for (let i = 0; i < 102; i++) await server.ask('POST', '/admin/v1/rules', { files: files(`${100 + i}/hour`), reason: `change ${i}` });
    await open(page, server, 'rules?tab=history');
    const rows = page.getByRole('row').filter({ hasText: /change|first|superseded|active/ });
    await expect(page.getByRole('row').filter({ hasText: /change \d/ })).toHaveCount(100);
    await page.getByRole('button', { name: 'Load older' }).click();
    await expect(page.getByRole('row').filter({ hasText: /change \d/ })).toHaveCount(102);
    await expect(page.getByRole('button', { name: 'Load older' })).toHaveCount(0);
    // What is published meanwhile comes on top, and nothing below is lost.
    await server.ask('POST', '/admin/v1/rules', { files: files('90/hour'), reason: 'change later' });
    await expect(rows.filter({ hasText: 'change later' })).toContainText('active');
    await expect(page.getByRole('row').filter({ hasText: /change \d/ })).toHaveCount(102);
    await expect(page.getByRole('button', { name: 'Roll back to revision 1', exact: true })).toBeVisible();
  } finally {
    await server.stop();
  }
});

test('a change by another operator does not throw a list back to its first page', async ({ page }) => {
  const server = await new Server().start();
  try {
    const lines = Array.from({ length: 150 }, (_, i) => JSON.stringify({ api_key: `many-${i}-0123456789`, overrides: [{ descriptor: 'default', requests_per_unit: 1_234_567, unit: 'day' }], reason: `line ${i}` }));
    const sent = await fetch(`${server.admin}/admin/v1/quotas/import`, { method: 'POST', headers: { 'content-type': 'application/x-ndjson' }, body: lines.join('\n') });
    expect(sent.status).toBe(200);
    await open(page, server, 'quotas');
    const rows = page.locator('tbody tr');
    await expect(rows).toHaveCount(100);
    await page.getByRole('button', { name: 'Load more' }).click();
    await expect(rows).toHaveCount(150);
    await expect(rows.first(), 'to the last unit').toContainText('1,234,567 / day');
    await server.ask('PUT', '/admin/v1/quotas/one-more-0123456789', { tier: 'pro', reason: 'ticket 4' });
    await expect(page.getByRole('row').filter({ hasText: 'ticket 4' })).toBeVisible();
    await expect(rows).toHaveCount(151);
    // A filter begins anew.
    await page.getByLabel('Tier').fill('pro');
    await page.getByRole('button', { name: 'Filter' }).click();
    await expect(rows).toHaveCount(1);
    await page.getByRole('button', { name: 'Clear' }).click();
    await expect(rows).toHaveCount(100);

    await page.getByRole('button', { name: 'Import…' }).click();
    const file = page.getByLabel('File');
    await file.setInputFiles({ name: 'one.ndjson', mimeType: 'application/x-ndjson', buffer: Buffer.from('{}') });
    await page.keyboard.press('Escape');
    await page.getByRole('button', { name: 'Import…' }).click();
    expect(await file.evaluate((field: HTMLInputElement) => field.files?.length), 'a file that was not sent is not kept').toBe(0);
    await expect(page.getByRole('dialog').getByRole('button', { name: 'Import' })).toBeDisabled();
  } finally {
    await server.stop();
  }
});

test('the focus goes back to what opened the first dialog', async ({ page }) => {
  const server = await new Server().start();
  try {
    const key = 'focus-0123456789';
    await server.exhaust({ api_key: key });
    await open(page, server, 'decisions?verdict=deny&rule=per-key');
    const opener = page.getByRole('button', { name: /^Explain decision/ }).first();
    const dialog = page.getByRole('dialog');
    await opener.focus();
    await page.keyboard.press('Enter');
    await dialog.getByRole('button', { name: /Override this caller/ }).focus();
    await page.keyboard.press('Enter');
    await expect(dialog.getByLabel('Requests')).toBeVisible();
    expect(await page.evaluate(() => document.activeElement?.closest('dialog') !== null), 'the second dialog has it').toBe(true);
    await page.keyboard.press('Escape');
    await expect(dialog).toHaveCount(0);
    await expect(opener).toBeFocused();

    await server.ask('PUT', `/admin/v1/quotas/${key}`, { tier: 'pro', reason: 'ticket 5' });
    await open(page, server, 'quotas');
    await page.getByLabel('API key (exact)').fill(key);
    await page.keyboard.press('Enter');
    await page.getByRole('button', { name: 'Usage' }).focus();
    await page.keyboard.press('Enter');
    const give = dialog.getByRole('button', { name: 'Grant units…' });
    await give.focus();
    await page.keyboard.press('Enter');
    await expect(dialog.getByLabel('Rule')).toBeFocused();
    await dialog.getByRole('button', { name: 'Cancel' }).focus();
    await page.keyboard.press('Enter');
    await expect(give).toBeFocused();
    await page.keyboard.press('Enter');
    await dialog.getByLabel('Units').fill('1234567');
    await dialog.getByLabel('Reason').fill('ticket 6');
    await page.keyboard.press('Enter');
    await expect(dialog).toContainText('Grant: 1,234,567 of 1,234,567 units left');
    await expect(give).toBeFocused();
    await page.setViewportSize({ width: 360, height: 740 });
    const tag = await dialog.getByText('units left').boundingBox();
    const around = await dialog.boundingBox();
    expect((tag?.x ?? 0) + (tag?.width ?? 0), 'nothing of it is cut off').toBeLessThanOrEqual((around?.x ?? 0) + (around?.width ?? 0));
    await page.keyboard.press('Escape');
    await expect(page.getByRole('button', { name: 'Usage' })).toBeFocused();
  } finally {
    await server.stop();
  }
});

test('the rule tree counts correctly and fits a phone', async ({ page }) => {
  const server = await new Server().start('domain: sample\ndescriptors:\n  - key: api_key\n    descriptors:\n      - key: endpoint\n        value: POST /login\n        limit: 5/hour\n');
  try {
    await open(page, server, 'rules?tab=foo');
    await expect(page.getByRole('tab', { name: 'Active' })).toHaveAttribute('aria-selected', 'true');
    await expect(page.getByText('1 rule', { exact: true })).toBeVisible();
    await page.setViewportSize({ width: 360, height: 740 });
    const nested = page.locator('td.deep').nth(1);
    await expect(nested).toContainText('endpoint');
    const [row, code] = [await page.locator('tbody tr').nth(1).boundingBox(), await nested.locator('code').boundingBox()];
    expect((code?.x ?? 0) + (code?.width ?? 0), 'nothing is cut off').toBeLessThanOrEqual(360);
    expect(row?.height, 'the row is dense').toBeLessThan(120);
  } finally {
    await server.stop();
  }
});
