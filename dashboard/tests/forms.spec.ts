// Forms that must not lose, shorten or move what somebody has agreed on or written.
import type { Page } from '@playwright/test';
import { expect, open, RULES, Server, test } from './server';

interface Quota {
  tier: string | null;
  overrides: { descriptor: string; requests_per_unit: number; unit: string; burst?: number }[];
  expires_at: string | null;
  reason: string;
}

/** What the admin address tells, as another person would read it. */
async function told<T>(server: Server, path: string): Promise<T> {
  const answer = await fetch(server.admin + path);
  expect(answer.ok, `${path}: ${answer.status}`).toBe(true);
  return (await answer.json()) as T;
}
const quotaOf = (server: Server, key: string) => told<Quota>(server, `/admin/v1/quotas/${key}`);

/** Warnings of the page's own framework: each is a mistake in the page. */
function warnings(page: Page): string[] {
  const heard: string[] = [];
  page.on('console', (message) => {
    if (message.type() === 'warning') heard.push(message.text());
  });
  return heard;
}

test('terms for a key with an agreement are never thrown away unseen', async ({ page, server }) => {
  const heard = warnings(page);
  const key = 'agreed-already-0123456789';
  const limit = { descriptor: 'default', requests_per_unit: 70, unit: 'minute' };
  await server.ask('PUT', `/admin/v1/quotas/${key}`, { tier: 'pro', overrides: [limit], reason: 'ticket 1' });
  await open(page, server, 'quotas');
  await page.getByRole('button', { name: 'Agree on something…' }).click();
  const dialog = page.getByRole('dialog');
  await dialog.getByLabel('Tier').fill('free');
  await dialog.getByLabel('Reason').fill('ticket 2');
  // The key last, and Enter: nobody has seen what is agreed.
  await dialog.getByLabel('API key').fill(key);
  await page.keyboard.press('Enter');
  await expect(dialog.getByRole('status')).toContainText('Something is agreed with this caller already: tier pro; default 70 / minute (ticket 1).');
  await expect(dialog.getByLabel('Tier'), 'what was written stays').toHaveValue('free');
  await expect(dialog.getByLabel('Reason')).toHaveValue('ticket 2');
  await expect(dialog.getByLabel('Count'), 'what was not written is as agreed').toHaveValue('70');
  expect(await quotaOf(server, key), 'nothing is saved before it was seen').toMatchObject({ tier: 'pro', reason: 'ticket 1' });
  await dialog.getByRole('button', { name: 'Change', exact: true }).click();
  await expect(dialog).toHaveCount(0);
  expect(await quotaOf(server, key)).toMatchObject({ tier: 'free', reason: 'ticket 2', overrides: [limit] });

  // Somebody else was quicker: their terms are shown before they are replaced.
  await page.getByRole('row').filter({ hasText: 'ticket 2' }).getByRole('button', { name: /^Change/ }).click();
  await expect(dialog.getByLabel('Reason')).toHaveValue('ticket 2');
  await server.ask('PUT', `/admin/v1/quotas/${key}`, { tier: 'enterprise', reason: 'ticket 3' });
  await dialog.getByLabel('Reason').fill('ticket 4');
  await dialog.getByRole('button', { name: 'Change', exact: true }).click();
  await expect(dialog.getByRole('alert')).toBeVisible();
  await dialog.getByRole('button', { name: 'Change', exact: true }).click();
  await expect(dialog.getByRole('status')).toContainText('tier enterprise (ticket 3)');
  await expect(dialog.getByLabel('Tier')).toHaveValue('enterprise');
  await expect(dialog.getByLabel('Reason')).toHaveValue('ticket 4');
  await page.keyboard.press('Escape');
  await expect(dialog).toHaveCount(0);
  await server.ask('DELETE', `/admin/v1/quotas/${key}`);
  expect(heard).toEqual([]);
});

test('the terms of one key are not offered for another', async ({ page, server }) => {
  const [first, second] = ['first-key-0123456789', 'second-key-0123456789'];
  await server.ask('PUT', `/admin/v1/quotas/${first}`, { tier: 'pro', expires_at: '2099-01-02T10:20:45Z', reason: 'ticket 5' });
  await open(page, server, 'quotas');
  await page.getByRole('button', { name: 'Agree on something…' }).click();
  const dialog = page.getByRole('dialog');
  await dialog.getByLabel('API key').fill(first);
  await dialog.getByLabel('Tier').focus();
  await expect(dialog.getByLabel('Reason')).toHaveValue('ticket 5');
  await dialog.getByLabel('API key').fill(second);
  await page.keyboard.press('Enter');
  await expect(dialog.getByRole('status')).toContainText('Nothing is agreed with this key yet.');
  for (const name of ['Tier', 'Until', 'Reason']) await expect(dialog.getByLabel(name)).toHaveValue('');
  await dialog.getByLabel('Tier').fill('pro');
  await dialog.getByLabel('Reason').fill('ticket 6');
  await dialog.getByRole('button', { name: 'Agree', exact: true }).click();
  await expect(dialog).toHaveCount(0);
  expect(await quotaOf(server, second)).toMatchObject({ tier: 'pro', expires_at: null, reason: 'ticket 6' });
  for (const key of [first, second]) await server.ask('DELETE', `/admin/v1/quotas/${key}`);
});

test('changing the reason alone does not move the end', async ({ page, server }) => {
  const key = 'to-the-second-0123456789';
  await server.ask('PUT', `/admin/v1/quotas/${key}`, { tier: 'pro', expires_at: '2099-01-02T10:20:45Z', reason: 'ticket 7' });
  await open(page, server, 'quotas');
  await page.getByRole('row').filter({ hasText: 'ticket 7' }).getByRole('button', { name: /^Change/ }).click();
  const dialog = page.getByRole('dialog');
  await expect(dialog.getByLabel('Reason')).toHaveValue('ticket 7');
  await dialog.getByLabel('Reason').fill('ticket 8');
  await dialog.getByRole('button', { name: 'Change', exact: true }).click();
  await expect(dialog).toHaveCount(0);
  expect(await quotaOf(server, key)).toMatchObject({ expires_at: '2099-01-02T10:20:45Z', reason: 'ticket 8' });
  await server.ask('DELETE', `/admin/v1/quotas/${key}`);
});

test('a limit of its own begins above what the caller has, and says what that is', async ({ page }) => {
  const server = await new Server().start(RULES.replace('limit: 5/hour', 'limit: 200/second\n    burst: 300'));
  try {
    const key = 'wants-more-0123456789';
    const row = page.getByRole('row').filter({ hasText: 'log-ins' }).first();
    await server.exhaust({ api_key: key, endpoint: 'POST /login' });
    await open(page, server, 'overview');
    await row.getByRole('button', { name: /^Override/ }).click();
    const dialog = page.getByRole('dialog');
    // A rule that counts more than the key, which usage alone does not know.
    await expect(dialog).toContainText('log-ins allows it 2 / 1h now');
    await expect(dialog.getByLabel('Count')).toHaveValue('4');
    await expect(dialog.getByLabel('Per', { exact: true })).toHaveValue('hour');
    await dialog.getByRole('button', { name: 'Remove limit 1' }).click();
    await expect(dialog.getByLabel('Count'), 'what was taken out stays out').toHaveCount(0);
    await page.keyboard.press('Escape');

    // By the counters, where no denial is in the log.
    await server.ask('POST', '/admin/v1/emergency', { action: 'block', target: { kind: 'api_key', value: 'blocked-0123456789' }, reason: 'incident 1' });
    await expect.poll(() => server.check({ api_key: 'blocked-0123456789' })).toBe(false);
    const blocked = page.getByRole('row').filter({ hasText: 'bloc…' }).first();
    await blocked.getByRole('button', { name: /^Override/ }).click();
    await expect(dialog).toContainText('per-key allows it 200 / 1s, burst 300 now');
    await expect(dialog.getByLabel('Count')).toHaveValue('400');
    await expect(dialog.getByLabel('Burst')).toHaveValue('600');
    await expect(dialog.getByLabel('Per', { exact: true })).toHaveValue('second');
    await dialog.getByLabel('Reason').fill('ticket 9');
    await dialog.getByRole('button', { name: 'Agree', exact: true }).click();
    await expect(dialog).toHaveCount(0);
    expect(await quotaOf(server, 'blocked-0123456789')).toMatchObject({ overrides: [{ descriptor: 'default', requests_per_unit: 400, unit: 'second', burst: 600 }] });
  } finally {
    await server.stop();
  }
});

test('who is blocked by hand is not offered a limit that would change nothing', async ({ page }) => {
  const server = await new Server().start();
  try {
    const key = 'by-hand-0123456789';
    await server.ask('POST', '/admin/v1/emergency', { action: 'block', target: { kind: 'api_key', value: key }, reason: 'incident 3' });
    await expect.poll(() => server.check({ api_key: key })).toBe(false);
    await open(page, server, 'decisions?verdict=deny');
    await page.getByRole('row').filter({ hasText: 'a measure of an operator' }).first().getByRole('button', { name: /^Why/ }).click();
    const dialog = page.getByRole('dialog');
    await expect(dialog).toContainText('A switch by hand goes before every limit');
    await expect(dialog.getByRole('button', { name: /limit of its own/ })).toHaveCount(0);
    await dialog.getByRole('link', { name: 'See what is switched' }).click();
    await expect(page.getByRole('heading', { level: 1, name: 'Emergency' })).toBeVisible();
    await expect(page.getByText('incident 3')).toBeVisible();
  } finally {
    await server.stop();
  }
});

test('renewing a switch never shortens it', async ({ page, server }) => {
  await server.ask('POST', '/admin/v1/emergency', { action: 'block', target: { kind: 'api_key', value: 'a-day-0123456789' }, reason: 'incident 2', ttl_seconds: 86_400 });
  const [before] = await told<{ active: { id: string; expires_at: string }[] }>(server, '/admin/v1/emergency').then((list) => list.active);
  await open(page, server, 'emergency');
  await expect(page.getByRole('timer')).toHaveText(/^(24:00:00|23:59:\d\d)$/);
  await page.getByRole('button', { name: 'Renew' }).click();
  await expect(page.getByText('Renewed: it ends in 1 d')).toBeVisible();
  await expect(page.getByRole('timer')).toHaveText(/^(24:00:00|23:59:\d\d)$/);
  const [after] = await told<{ active: { id: string; expires_at: string }[] }>(server, '/admin/v1/emergency').then((list) => list.active);
  expect(new Date(after?.expires_at ?? 0).getTime()).toBeGreaterThanOrEqual(new Date(before?.expires_at ?? 0).getTime());
  await server.ask('DELETE', `/admin/v1/emergency/${after?.id}`);
});
