-- Compare prefixes by their characters, regardless of the server's locale, as SQLite does by default.
ALTER TABLE quotas ALTER COLUMN key_prefix TYPE TEXT COLLATE "C";
