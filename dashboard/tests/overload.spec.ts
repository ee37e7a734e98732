// Overload: what a gateway sheds, whose share is what, and limits that follow signals.
import { createServer, type ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';
import { expect, open, Server, test } from './server';

const SIGNALS = `domain: sample
descriptors: [{key: api_key, name: per-key, limit: 10/hour}]
overload:
  adapt: {signals: {queue_depth: 100}, order: [free, pro], least: 20%}
`;

const WORKERS = `domain: sample
overload:
  priorities: [{when: {path: /critical}, priority: critical}]
  workers: {limit: 1}
  fairness: {by: tenant, guarantees: {enterprise: 5% each}}
`;

const FLEET = `domain: sample
overload:
  fleet: {capacity: 100/second}
  fairness: {by: tenant, guarantees: {enterprise: 5% each, free: 10% together}}
`;

const SHADOW = `domain: sample
overload:
  priorities: [{when: {path: /pay}, priority: critical}]
  fleet: {capacity: 2/hour, reserve: {critical: 50%}}
  adapt: {signals: {queue_depth: 100}, order: [free], least: 20%, step: 1h}
  shadow: true
`;

test('without a section it says what to add', async ({ page, server }) => {
  await open(page, server, 'overload');
  await expect(page.getByText('Nothing is shed here')).toBeVisible();
});

test('signals and the levels of tiers are shown, and steps are audited', async ({ page }) => {
  const server = await new Server('signals').start(SIGNALS);
  try {
    // The page is open first: a signal that is not repeated expires.
    await open(page, server, 'overload');
    const sent = await fetch(`${server.http}/v1/signals`, { method: 'POST', body: JSON.stringify({ domain: 'sample', signals: { queue_depth: 150 } }) });
    expect(sent.status).toBe(200);
    await expect(page.getByRole('row', { name: /queue_depth/ })).toContainText('150');
    await expect(page.getByRole('row', { name: /free/ })).toContainText('80%');
    await expect(page.getByRole('row', { name: /pro/ })).toContainText('100%');
    await expect(page.getByText('tightened')).toBeVisible();
    await expect(async () => {
      await open(page, server, 'audit');
      await expect(page.getByText('overload.adapt').first()).toBeVisible({ timeout: 2_000 });
      await expect(page.getByText('sample/free').first()).toBeVisible();
    }).toPass();
  } finally {
    await server.stop();
  }
});

test('requests in flight and what was shed by priority are shown', async ({ page }) => {
  const held: ServerResponse[] = [];
  const upstream = createServer((_, response) => void held.push(response));
  await new Promise<void>((ready) => upstream.listen(0, '127.0.0.1', ready));
  const server = new Server('gateway');
  try {
    await server.startGateway(WORKERS, (upstream.address() as AddressInfo).port);
    const first = fetch(`${server.http}/x`);
    await expect.poll(() => held.length).toBe(1);
    expect((await fetch(`${server.http}/y`)).status).toBe(503);
    await open(page, server, 'overload');
    await expect(page.getByRole('heading', { name: /^up / })).toBeVisible();
    await expect(page.getByRole('img', { name: '1 of 1 in flight' })).toBeVisible();
    const cells = page.getByRole('row', { name: /^normal/ }).getByRole('cell');
    await expect(cells.nth(3)).toHaveText('1');
    await expect(page.getByRole('row', { name: /^enterprise/ })).toBeVisible();
    held.pop()?.end('hello');
    expect((await first).status).toBe(200);
    await expect(page.getByRole('img', { name: '0 of 1 in flight' })).toBeVisible();
  } finally {
    await server.stop();
    upstream.closeAllConnections();
    upstream.close();
  }
});

test("what the fleet's capacity sheds by priority is shown, also where nothing is enforced", async ({ page }) => {
  const server = await new Server('shadow').start(SHADOW);
  try {
    const check = { domain: 'sample', attributes: { path: '/x' } };
    const sent = async (path: string, body: object) => await fetch(server.http + path, { method: 'POST', body: JSON.stringify(body) });
    for (const status of [200, 200]) expect((await sent('/v1/check', check)).status).toBe(status);
    expect((await sent('/v1/signals', { domain: 'sample', signals: { queue_depth: 150 } })).status).toBe(200);
    await open(page, server, 'overload');
    const fleet = page.getByRole('region', { name: /^Fleet's capacity/ });
    await expect(fleet).toContainText('2/1h');
    await expect(fleet).toContainText('nothing is shed');
    await expect(fleet.getByRole('row', { name: /^critical/ }).getByRole('cell')).toHaveText(['critical', '2', '0', '0']);
    await expect(fleet.getByRole('row', { name: /^normal/ }).getByRole('cell')).toHaveText(['normal', '1', '0', '1']);
    const adapted = page.getByRole('region', { name: /^Adapted limits/ });
    await expect(adapted.getByRole('row', { name: /^free/ })).toContainText('100% (would be 80%)');
  } finally {
    await server.stop();
  }
});

test("shares of tenants in the fleet's capacity are shown", async ({ page }) => {
  const server = await new Server('fleet').start(FLEET);
  try {
    await open(page, server, 'overload');
    await expect(page.getByRole('heading', { name: /^Fleet's capacity/ })).toBeVisible();
    await expect(page.getByRole('row', { name: /^enterprise/ })).toContainText('5% each');
    await expect(page.getByRole('row', { name: /^free/ })).toContainText('10% together');
    await expect(page.getByRole('row', { name: /^other/ })).toBeVisible();
  } finally {
    await server.stop();
  }
});
