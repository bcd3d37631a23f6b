//! What on this machine works.
