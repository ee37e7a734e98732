-- What operators decide in an emergency. One that was ended stays, so that it can be read about.
CREATE TABLE emergencies (
    id             TEXT PRIMARY KEY,
    action         TEXT NOT NULL,
    kind           TEXT NOT NULL,
    -- The hash in hexadecimal digits, where it is about an API key.
    target         TEXT NOT NULL,
    -- The same for the eye: of an API key its first characters.
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

-- Extra quota of single callers, once. What is left of it is a counter.
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
