//! Local user behind a connection: on Linux, the table of TCP sockets names the user of each end.
//! Other systems do not tell.

use std::fs;
use std::net::SocketAddr;

/// A user of this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct User {
    /// User id.
    pub id: u32,
    /// True if this program runs as the same user.
    pub is_owner: bool,
}

/// User of the socket at `peer`, connected to this program's socket at `own`. `None` for other
/// machines, or if the system does not tell.
pub fn user_of(peer: SocketAddr, own: SocketAddr) -> Option<User> {
    if !peer.ip().is_loopback() {
        return None;
    }
    let table = match peer {
        SocketAddr::V4(_) => "/proc/net/tcp",
        SocketAddr::V6(_) => "/proc/net/tcp6",
    };
    let table = fs::read_to_string(table).ok()?;
    let id = read(&table, peer, own)?;
    let is_owner = read(&table, own, peer) == Some(id);
    Some(User { id, is_owner })
}

/// Looks up a socket in the system's table: `sl local remote st tx:rx tr:when retrnsmt uid ...`.
fn read(table: &str, peer: SocketAddr, own: SocketAddr) -> Option<u32> {
    let ends = (name(peer), name(own));
    table.lines().skip(1).find_map(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let these = (fields.next()?, fields.next()?);
        // A socket that its process has closed is listed with user 0, so only open ones count.
        let is_open = fields.next()? == "01";
        let is_it = is_open && these == (ends.0.as_str(), ends.1.as_str());
        is_it.then(|| fields.nth(3)?.parse().ok()).flatten()
    })
}

/// Formats an address as the table does: words of four bytes in native byte order, in hexadecimal.
fn name(address: SocketAddr) -> String {
    let word = |bytes: &[u8]| bytes.try_into().map_or(0, u32::from_ne_bytes);
    let words = |bytes: &[u8]| -> String {
        let words = bytes.chunks_exact(4).map(word);
        words.map(|word| format!("{word:08X}")).collect()
    };
    let ip = match address {
        SocketAddr::V4(v4) => words(&v4.ip().octets()),
        SocketAddr::V6(v6) => words(&v6.ip().octets()),
    };
    format!("{ip}:{:04X}", address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1DB2 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1
   1: 0100007F:C350 0100007F:1DB2 01 00000000:00000000 00:00000000 00000000  1001        0 2
   2: 0100007F:C351 0100007F:1DB2 04 00000000:00000000 00:00000000 00000000     0        0 3
   3: 0100007F:C352 0100007F:1DB2 01
";

    #[test]
    #[cfg(target_endian = "little")]
    fn the_socket_table_names_the_user_of_open_sockets_only() {
        let at = |port| SocketAddr::from(([127, 0, 0, 1], port));
        assert_eq!(read(TABLE, at(50_000), at(7602)), Some(1001));
        assert_eq!(read(TABLE, at(50_000), at(7603)), None);
        assert_eq!(read(TABLE, at(50_001), at(7602)), None);
        assert_eq!(read(TABLE, at(50_002), at(7602)), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_systems_table_names_this_user() {
        use std::os::unix::fs::MetadataExt as _;
        let own = fs::metadata("/proc/self").unwrap().uid();
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = std::net::TcpListener::bind(address) else {
                continue;
            };
            let at = listener.local_addr().unwrap();
            let client = std::net::TcpStream::connect(at).unwrap();
            let (_accepted, peer) = listener.accept().unwrap();
            let owner = User {
                id: own,
                is_owner: true,
            };
            assert_eq!(user_of(peer, at), Some(owner));
            drop(client);
        }
        let far = SocketAddr::from(([192, 0, 2, 1], 1));
        assert_eq!(user_of(far, far), None);
    }
}
