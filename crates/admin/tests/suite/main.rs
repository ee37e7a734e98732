//! The admin API, through its router.

mod routes;
