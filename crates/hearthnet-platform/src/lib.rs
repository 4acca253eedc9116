//! Interfaces of the operating system. Imports no crate of this repository; the others name no
//! system interface (the repository's `tests/architecture.rs` checks it).
//!
//! | concept | module | folder |
//! |---|---|---|
//! | files that survive a power cut; access to new files | [`whole_file`] | `unix/` |
//! | opening of regular files only | [`regular_file`] | `unix/` |
//! | owners, permissions and numbers of files | [`files`] | `unix/` |
//! | sockets between programs of one user | `local_socket` (feature `net`) | `unix/` |
//! | signals that end a program | `signals` (feature `net`) | `unix/` |
//! | terminal: size, echo, waiting input, process groups | [`terminal`] | `unix/` |
//! | replacing this process | [`replace()`] | `unix/` |
//! | clocks, local time, name of the machine, priority of a thread | [`machine`] | `unix/` |
//! | free memory, processor and its cache, graphics cards | [`hardware`] | `linux/` |
//! | memory of the machine and of control groups, and its pressure | [`memory`] | `linux/` |
//! | processor time of the machine and of this process | [`cpu_time`] | `linux/` |
//! | battery | [`power`] | `linux/` |
//! | holes of sparse files | [`holes`] | `linux/` |
//! | state and memory of a process; its end | [`process`] | `linux/` |
//! | connection between two processes, which carries open files | [`pipe`] | `linux/` |
//! | user at the other end of a TCP connection | [`peer`] | `linux/` |
//! | cores that threads run on | [`cores`], [`affinity`] | `linux/` |
//! | access of this process to files and system calls | `sandbox` (feature of that name) | `linux/` |
//!
//! A folder holds what a family of systems has in common. Modules that read the tables of the Linux
//! kernel compile everywhere: where there is no such table, they answer that nothing is known.

mod linux;
mod unix;

pub use linux::*;
pub use unix::*;
