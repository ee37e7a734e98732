-- Beginnings are compared by their characters, whatever language the server sorts by; SQLite does so by itself.
ALTER TABLE quotas ALTER COLUMN key_prefix TYPE TEXT COLLATE "C";
