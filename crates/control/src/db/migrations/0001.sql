-- Types that both databases accept: BIGINT for numbers and times, TEXT, BYTEA (SQLite stores blobs unchanged).

-- One row: every change takes the next control revision and the next link of the audit chain, in order.
CREATE TABLE head (
    id             BIGINT PRIMARY KEY CHECK (id = 1),
    revision       BIGINT NOT NULL,
    audit_seq      BIGINT NOT NULL,
    audit_hash     BYTEA NOT NULL,
    key_secret     BYTEA NOT NULL
);

-- Quotas of single callers. A deleted row stays, so that other nodes learn of the deletion.
CREATE TABLE quotas (
    key_hash       BYTEA PRIMARY KEY,
    key_prefix     TEXT NOT NULL,
    tier           TEXT,
    overrides      TEXT NOT NULL,
    effective_at   BIGINT,
    expires_at     BIGINT,
    reason         TEXT NOT NULL,
    author         TEXT NOT NULL,
    updated_at     BIGINT NOT NULL,
    deleted        BIGINT NOT NULL,
    revision       BIGINT NOT NULL UNIQUE
);
CREATE INDEX quotas_by_tier ON quotas (tier, key_hash);

CREATE TABLE tokens (
    id             TEXT PRIMARY KEY,
    name           TEXT NOT NULL,
    role           TEXT NOT NULL,
    salt           BYTEA NOT NULL,
    hash           BYTEA NOT NULL,
    created_at     BIGINT NOT NULL,
    expires_at     BIGINT,
    revoked_at     BIGINT
);

CREATE TABLE audit (
    seq            BIGINT PRIMARY KEY,
    at             BIGINT NOT NULL,
    actor          TEXT NOT NULL,
    origin         TEXT NOT NULL,
    action         TEXT NOT NULL,
    target         TEXT NOT NULL,
    before         TEXT NOT NULL,
    after          TEXT NOT NULL,
    hash           BYTEA NOT NULL
);
