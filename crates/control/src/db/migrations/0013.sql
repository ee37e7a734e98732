-- Consumption of durable counters, so that it survives the counter store. Each process writes its own rows, with absolute
-- values that only grow in `seq`, so that a repeated write changes nothing. Readers add the rows. Counters are keyed hashes;
-- `slot` and `last_at` are microseconds, `expires_at` is seconds.
CREATE TABLE durable_consumption (
    counter        BYTEA NOT NULL,
    slot           BIGINT NOT NULL,
    cell           TEXT NOT NULL,
    instance       TEXT NOT NULL,
    part           BIGINT NOT NULL,
    units          BIGINT NOT NULL,
    reported       BIGINT NOT NULL,
    last_at        BIGINT NOT NULL,
    expires_at     BIGINT NOT NULL,
    seq            BIGINT NOT NULL,
    PRIMARY KEY (counter, slot, cell, instance, part)
);
CREATE INDEX durable_consumption_by_expiry ON durable_consumption (expires_at);
