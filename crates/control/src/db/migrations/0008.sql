-- Tells a right token from a wrong one without argon2. Tokens that were made before have none until they are next used.
ALTER TABLE tokens ADD COLUMN digest BYTEA;
