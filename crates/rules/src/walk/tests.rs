//! Tests of the walks.
