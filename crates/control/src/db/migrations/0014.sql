-- Small records that nodes share for a while, by compare and exchange. `expires_at` is milliseconds by the database's clock.
CREATE TABLE shared_records (
    name           BYTEA NOT NULL PRIMARY KEY,
    record         BYTEA NOT NULL,
    expires_at     BIGINT NOT NULL
);
