-- Emergency measures. An ended measure stays, for reference.
CREATE TABLE emergencies (
    id             TEXT PRIMARY KEY,
    action         TEXT NOT NULL,
    kind           TEXT NOT NULL,
    -- For an API key, its hash in hexadecimal digits.
    target         TEXT NOT NULL,
    -- The target for display: for an API key, its first characters.
    shown          TEXT NOT NULL,
    factor         BIGINT,
    reason         TEXT NOT NULL,
    author         TEXT NOT NULL,
    created_at     BIGINT NOT NULL,
    expires_at     BIGINT NOT NULL,
    ended          BIGINT NOT NULL,
    revision       BIGINT NOT NULL
);
CREATE INDEX emergencies_by_end ON emergencies (expires_at);

-- Grants: extra units for single callers, once. The remainder is a counter.
CREATE TABLE grants (
    id             TEXT PRIMARY KEY,
    key_hash       BYTEA NOT NULL,
    key_prefix     TEXT NOT NULL,
    rule           TEXT NOT NULL,
    units          BIGINT NOT NULL,
    reason         TEXT NOT NULL,
    author         TEXT NOT NULL,
    created_at     BIGINT NOT NULL,
    expires_at     BIGINT NOT NULL,
    revision       BIGINT NOT NULL
);
CREATE INDEX grants_by_revision ON grants (revision);
