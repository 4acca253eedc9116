//! Interfaces of POSIX systems.

pub mod files;
#[cfg(feature = "net")]
pub mod local_socket;
pub mod machine;
pub mod regular_file;
mod replace;
#[cfg(feature = "net")]
pub mod signals;
pub mod terminal;
pub mod whole_file;

pub use replace::replace;
