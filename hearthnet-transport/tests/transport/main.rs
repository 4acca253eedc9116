//! Tests of the transport in one binary: in virtual time, and over real sockets.

mod support;

mod deadlines;
mod loopback;
mod paths;
mod properties;
mod sessions;
mod violations;
