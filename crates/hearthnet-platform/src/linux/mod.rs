//! Interfaces of Linux.

#[cfg(target_os = "linux")]
pub mod affinity;
#[cfg(target_os = "linux")]
pub mod cores;
pub mod cpu_latency;
pub mod hardware;
pub mod peer;
pub mod process;
#[cfg(all(target_os = "linux", feature = "sandbox"))]
pub mod sandbox;

/// Value of `name` in a table with lines like `VmRSS:   1024 kB`.
fn value<'a>(table: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = table.lines();
    lines
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
        .map(str::trim)
}

/// Bytes of `name` in such a table, which gives them in kB.
fn bytes(table: &str, name: &str) -> Option<u64> {
    let kib: u64 = value(table, name)?
        .strip_suffix("kB")?
        .trim()
        .parse()
        .ok()?;
    kib.checked_mul(1024)
}
