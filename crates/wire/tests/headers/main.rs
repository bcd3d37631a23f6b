//! Headers against bytes written by hand, against the specifications, and against all that can be drawn.
//! One program, linked once.

mod cm;
mod internet;
mod properties;
mod sdp;
mod spec;
mod vectors;
