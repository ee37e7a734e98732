//! Subcommands that run once and exit: rule files, tests, and clients of the admin API.

pub(crate) mod access;
pub(crate) mod caller;
pub(crate) mod consumption;
pub(crate) mod doctor;
pub(crate) mod emergency;
pub(crate) mod explain;
pub(crate) mod generate;
pub(crate) mod health;
pub(crate) mod quota;
pub(crate) mod region;
pub(crate) mod rule_export;
pub(crate) mod rule_files;
pub(crate) mod rules;
pub(crate) mod test;
pub(crate) mod top;
pub(crate) mod usage;
pub(crate) mod why;
