-- Distinguishes valid tokens from wrong ones without argon2. Older tokens have none until they are next used.
ALTER TABLE tokens ADD COLUMN digest BYTEA;
