// Logging in, what a role may do, and how a session ends.
import { expect, Server, test } from './server';

test('a token opens a session, and its end ends it', async ({ page, context }) => {
  const server = await new Server().start();
  try {
    const token = server.token('vera', 'viewer');
    await page.goto(server.admin + '/#/quotas');
    await expect(page.getByRole('heading', { name: 'Tollgate' })).toBeVisible();
    await expect(page.getByLabel('Token')).toBeFocused();

    await page.getByLabel('Token').fill('tg_wrong');
    await page.keyboard.press('Enter');
    await expect(page.getByRole('alert')).toContainText('the token is wrong');

    await page.getByLabel('Token').fill(token);
    await page.keyboard.press('Enter');
    await expect(page.getByRole('heading', { level: 1, name: 'Quotas' })).toBeVisible();
    await expect(page.getByText('vera')).toBeVisible();
    await expect(page.getByRole('button', { name: 'Set quota…' }), 'a viewer changes nothing').toHaveCount(0);
    const cookie = (await context.cookies()).find((one) => one.name === 'tollgate_session');
    expect(cookie).toMatchObject({ httpOnly: true, sameSite: 'Strict', path: '/' });
    expect(await page.evaluate(() => document.cookie), 'no script sees it').toBe('');

    // Another site has nothing from the cookie, and a change says where it was made.
    const change = (headers: Record<string, string>) =>
      fetch(server.admin + '/admin/v1/quotas/k', { method: 'DELETE', headers: { cookie: `tollgate_session=${cookie?.value}`, ...headers } });
    expect((await change({ origin: 'http://elsewhere.example' })).status).toBe(403);
    expect((await change({})).status).toBe(403);

    await page.getByRole('link', { name: 'Audit' }).click();
    await expect(page.getByText('Your role does not allow this.')).toBeVisible();

    await page.getByRole('button', { name: 'Log out' }).click();
    await expect(page.getByLabel('Token')).toBeVisible();

    await page.getByLabel('Token').fill(token);
    await page.keyboard.press('Enter');
    await expect(page.getByRole('button', { name: 'Log out' })).toBeVisible();
    server.run('token', 'revoke', '--db', server.db, token.split('_')[1] ?? '');
    await page.reload();
    await expect(page.getByLabel('Token'), 'the session dies with the token').toBeVisible();
  } finally {
    await server.stop();
  }
});
