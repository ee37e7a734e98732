-- Samples need not survive a crash or reach a standby.
ALTER TABLE traffic_asked SET UNLOGGED;
ALTER TABLE traffic_told SET UNLOGGED;
