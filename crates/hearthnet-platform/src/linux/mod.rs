//! Interfaces of Linux.

#[cfg(target_os = "linux")]
pub mod affinity;
#[cfg(target_os = "linux")]
pub mod cores;
pub mod cpu_time;
pub mod hardware;
pub mod holes;
pub mod memory;
pub mod peer;
#[cfg(target_os = "linux")]
pub mod pipe;
pub mod power;
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

#[cfg(test)]
mod tests {
    use super::bytes;

    #[test]
    fn odd_sizes_are_none() {
        let table = "MemTotal:       16384 kB\nMemAvailable:    2048 kB\nBuffers: 1 kB\n";
        assert_eq!(bytes(table, "MemAvailable"), Some(2 << 20));
        for odd in [
            "",
            "MemAvailable: many kB",
            "MemAvailable: 5",
            "MemAvailable: 99999999999999999999 kB",
        ] {
            assert_eq!(bytes(odd, "MemAvailable"), None, "{odd}");
        }
    }
}
