//! Cells that keep one limit together: their messages, their exchange, and what survives an outage.

mod durable;
mod durable_cells;
mod durable_late;
mod durable_outages;
mod durable_room;
mod exchange;
mod late;
mod late_charges;
mod messages;
mod no_link;
mod overdrafts;
mod refunds;
mod refused_late;
mod regional;
mod same_name;
mod slow_store;
