-- The attribute that identifies the caller of a quota or grant: an API key, unless stated otherwise.
ALTER TABLE quotas ADD COLUMN attribute TEXT NOT NULL DEFAULT 'api_key';
ALTER TABLE grants ADD COLUMN attribute TEXT NOT NULL DEFAULT 'api_key';
-- For lists of one attribute. Quotas of API keys, which may be millions, are not in it.
CREATE INDEX quotas_by_attribute ON quotas (attribute, key_hash) WHERE attribute <> 'api_key';
