// The page in a real browser (Debian's chromium-headless-shell) on the real server. Each test file starts servers of its own.
import { defineConfig } from '@playwright/test';

export default defineConfig({
  testDir: 'tests',
  testMatch: process.env.TOLLGATE_SCREENSHOTS ? 'screenshots.ts' : '*.spec.ts',
  fullyParallel: false,
  workers: 2,
  // On a busy machine too, only a hang takes as long.
  timeout: 180_000,
  expect: { timeout: 30_000 },
  forbidOnly: true,
  retries: 0,
  reporter: 'list',
  outputDir: 'node_modules/.cache/playwright',
  use: {
    browserName: 'chromium',
    launchOptions: { executablePath: process.env.TOLLGATE_TEST_CHROMIUM ?? '/usr/bin/chromium-headless-shell', args: ['--no-sandbox', '--disable-background-networking'] },
  },
});
