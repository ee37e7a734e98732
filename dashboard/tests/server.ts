// The real binary on free ports of loopback, ended by its own process; and a page that may connect to no other server.
import { spawn, spawnSync, type ChildProcess } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { test as base, expect, type Locator, type Page } from '@playwright/test';

const BINARY = process.env.TOLLGATE_TEST_BINARY ?? join(import.meta.dirname, '../../target/debug/tollgate');

/** The admin address in the banner. */
const ADMIN = /^ +(?:admin|dashboard):? +(?:https?:\/\/)?([^\s/]+)/m;

export const RULES = `domain: sample
descriptors:
  # Every API key.
  - key: api_key
    name: per-key
    limit: 5/hour
    tiers: {pro: 100/hour}
    descriptors:
      - key: endpoint
        value: POST /login
        name: logins
        class: security
        limit: 2/hour
  - key: remote_address/24/64
    name: per-network
    limit: 30/minute
`;

/**
 * An address for a server that ends and comes back. Its port is outside the range that the kernel chooses from: while the server is
 * away, a connection of the browser could get a chosen one, to itself even. The tests in Rust use lower ports.
 */
async function stayingAddress(): Promise<string> {
  for (;;) {
    const port = 26_000 + Math.floor(Math.random() * 6_000);
    const listener = createServer();
    const isFree = await new Promise<boolean>((done) => {
      listener.once('error', () => done(false));
      listener.listen(port, '127.0.0.1', () => listener.close(() => done(true)));
    });
    if (isFree) return `127.0.0.1:${port}`;
  }
}

export class Server {
  readonly folder = mkdtempSync(join(tmpdir(), 'tollgate-dashboard-'));
  readonly db: string;
  /** Without a control-plane database. */
  isStateless = false;
  /** More flags. */
  flags: string[] = [];
  admin = '';
  http = '';
  private child: ChildProcess | null = null;

  /** With a database of its own, or another's. */
  constructor(readonly name = 'alone', beside?: Server) {
    this.db = beside?.db ?? `sqlite:${join(this.folder, 'test.db')}`;
  }

  /** By rules of a file, or of several. */
  async start(...rules: string[]): Promise<this> {
    const files = (rules.length > 0 ? rules : [RULES]).map((text, at) => {
      const name = at === 0 ? 'rules.yaml' : `rules-${at}.yaml`;
      writeFileSync(join(this.folder, name), text);
      return ['--rules', name];
    });
    const any = '127.0.0.1:0';
    await this.spawn(['serve', ...files.flat(), '--http', any, '--grpc', any, '--resp', 'off', '--memory', '16MiB'], /^ +http +(\S+)/m);
    return this;
  }

  /** As a gateway to an upstream named `up`, whose requests the attribute `path` tells apart. */
  async startGateway(rules: string, port: number): Promise<this> {
    writeFileSync(join(this.folder, 'rules.yaml'), rules);
    const config = `rules: [rules.yaml]
memory: 16MiB
gateway:
  listeners: [{address: "127.0.0.1:0"}]
  upstreams: {up: {addresses: ["127.0.0.1:${port}"]}}
  routes: [{path: "/{*rest}", upstream: up, domain: sample}]
`;
    writeFileSync(join(this.folder, 'gateway.yaml'), config);
    await this.spawn(['gateway', '--config', 'gateway.yaml'], /^ +gateway +http:\/\/(\S+)/m);
    return this;
  }

  /** Runs a command of the binary until it listens; `http` finds the address that requests go to in its banner. */
  private async spawn(words: string[], http: RegExp): Promise<void> {
    // Where a page that is open looks for it, if there has been one.
    const admin = this.admin ? new URL(this.admin).host : await stayingAddress();
    const child = spawn(BINARY, [...words, ...(this.isStateless ? [] : ['--db', this.db]), '--admin', admin, '--node', this.name, '--region', 'eu-west-1', ...this.flags], {
      cwd: this.folder,
      stdio: ['ignore', 'pipe', 'inherit'],
    });
    this.child = child;
    let greeting = '';
    await new Promise<void>((ready, failed) => {
      child.once('error', failed);
      child.once('exit', (code) => failed(new Error(`the server ended with ${code}`)));
      child.stdout.on('data', (data: Buffer) => {
        greeting += data.toString();
        if (ADMIN.test(greeting) && http.test(greeting) && /^ +rules /m.test(greeting)) ready();
      });
    });
    this.admin = `http://${ADMIN.exec(greeting)?.[1]}`;
    this.http = `http://${http.exec(greeting)?.[1]}`;
  }

  private async end(signal: 'SIGTERM' | 'SIGKILL'): Promise<void> {
    const child = this.child;
    if (!child || child.exitCode !== null || child.signalCode !== null) return;
    const ended = new Promise((done) => child.once('exit', done));
    child.kill(signal);
    await ended;
  }

  /** Ends at once; what it had sent stays on open pages. */
  async pause(): Promise<void> {
    await this.end('SIGKILL');
  }

  /** Ends at once, as by a power cut, and comes back at the same address. */
  async restart(): Promise<void> {
    await this.end('SIGKILL');
    await this.start();
  }

  /** Ends as a deployment would, and comes back at the same address: what it had counted is stored. */
  async redeploy(): Promise<void> {
    await this.end('SIGTERM');
    await this.start();
  }

  async stop(): Promise<void> {
    await this.end('SIGTERM');
    rmSync(this.folder, { recursive: true, force: true });
  }

  /** Runs a command of the binary; its output. */
  run(...words: string[]): string {
    const ran = spawnSync(BINARY, words, { encoding: 'utf8' });
    if (ran.status !== 0) throw new Error(`tollgate ${words.join(' ')}: ${ran.stderr}`);
    return ran.stdout.trim();
  }

  token(name: string, role: string): string {
    return this.run('token', 'create', '--db', this.db, '--name', name, '--role', role);
  }

  /** Asks the admin address, as another person would. */
  async ask(method: string, path: string, body?: unknown): Promise<void> {
    const answer = await fetch(this.admin + path, { method, body: body === undefined ? null : JSON.stringify(body) });
    if (!answer.ok) throw new Error(`${method} ${path}: ${await answer.text()}`);
  }

  /** The active emergency measures. */
  async emergencies(): Promise<{ id: string }[]> {
    const answer = await fetch(`${this.admin}/admin/v1/emergency`);
    return ((await answer.json()) as { active: { id: string }[] }).active;
  }

  /** Asks whether a request may pass. */
  async check(attributes: Record<string, string>, domain = 'sample'): Promise<boolean> {
    const answer = await fetch(`${this.http}/v1/check`, { method: 'POST', body: JSON.stringify({ domain, attributes }) });
    if (answer.status !== 200 && answer.status !== 429) throw new Error(`status ${answer.status}: ${await answer.text()}`);
    return answer.status === 200;
  }

  /** Sends checks until one is denied, so that there is a denial to look at. */
  async exhaust(attributes: Record<string, string>): Promise<void> {
    for (let i = 0; i < 1_000; i++) if (!(await this.check(attributes))) return;
    throw new Error('nothing limits this');
  }
}

interface Made {
  server: Server;
  /** A page whose every request and every complaint is looked at in the end. */
  page: Page;
}

export const test = base.extend<Made, { own: Server }>({
  own: [
    async ({}, use) => {
      const server = await new Server().start();
      await use(server);
      await server.stop();
    },
    { scope: 'worker' },
  ],
  server: async ({ own }, use) => use(own),
  page: async ({ page }, use) => {
    const complaints: string[] = [];
    const hosts = new Set<string>();
    page.on('request', (request) => hosts.add(new URL(request.url()).host));
    page.on('pageerror', (error) => complaints.push(error.message));
    page.on('console', (message) => {
      // A failed request is logged by the browser too; the page shows those itself.
      if (message.type() === 'error' && !message.text().startsWith('Failed to load resource')) complaints.push(message.text());
    });
    await use(page);
    hosts.delete('');
    for (const host of hosts) expect(host, 'no request goes to another host').toMatch(/^127\.0\.0\.1:/);
    expect(complaints, 'the browser complains of nothing').toEqual([]);
  },
});

export { expect };

export async function open(page: Page, server: Server, view: string): Promise<void> {
  await page.goto(`${server.admin}/#/${view}`);
  await expect(page.getByRole('heading', { level: 1 })).toBeVisible();
}

/** Chooses an action of a row's menu. */
export async function choose(page: Page, row: Locator, action: string): Promise<void> {
  await row.getByRole('button', { name: /^Actions for/ }).click();
  await page.getByRole('menuitem', { name: action }).click();
}
