-- Consumption of billed rules by hour. Each process writes its own rows, with absolute values that only grow in `seq`,
-- so that a repeated write changes nothing. Readers add the rows of all processes. `change` numbers the transactions.
CREATE TABLE consumption (
    hour           BIGINT NOT NULL,
    caller         BYTEA NOT NULL,
    caller_key     TEXT NOT NULL,
    domain         TEXT NOT NULL,
    rule           TEXT NOT NULL,
    meter          TEXT NOT NULL,
    instance       TEXT NOT NULL,
    part           BIGINT NOT NULL,
    caller_text    TEXT NOT NULL,
    units          BIGINT NOT NULL,
    requests       BIGINT NOT NULL,
    seq            BIGINT NOT NULL,
    change         BIGINT NOT NULL,
    PRIMARY KEY (hour, caller, caller_key, domain, rule, meter, instance, part)
);
CREATE INDEX consumption_by_change ON consumption (change);
-- Hours that are no longer kept, added up by month.
CREATE TABLE consumption_months (
    month          BIGINT NOT NULL,
    caller         BYTEA NOT NULL,
    caller_key     TEXT NOT NULL,
    domain         TEXT NOT NULL,
    rule           TEXT NOT NULL,
    meter          TEXT NOT NULL,
    caller_text    TEXT NOT NULL,
    units          BIGINT NOT NULL,
    requests       BIGINT NOT NULL,
    change         BIGINT NOT NULL,
    PRIMARY KEY (month, caller, caller_key, domain, rule, meter)
);
-- The last change; every writer locks this row first. And the state of the webhook: who sends, what has been sent, and
-- how far the round is that is being sent.
CREATE TABLE consumption_head (
    id             BIGINT PRIMARY KEY,
    change         BIGINT NOT NULL,
    holder         TEXT NOT NULL,
    held_until     BIGINT NOT NULL,
    sent_hour      BIGINT NOT NULL,
    sent_change    BIGINT NOT NULL,
    round_hour     BIGINT,
    round_change   BIGINT,
    round_after    TEXT NOT NULL
);
INSERT INTO consumption_head (id, change, holder, held_until, sent_hour, sent_change, round_after)
    VALUES (1, 0, '', 0, -1, 0, '');
