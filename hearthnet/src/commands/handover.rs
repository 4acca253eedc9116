//! Hands a link with a key to a browser of this user. Other users can read the command line of a
//! browser, so it names an address of this process, which redirects the browser to the link.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use hearthnet_platform::peer::user_of;
use zeroize::Zeroizing;

use crate::cli::Failure;

/// Most bytes of a request's head, and longest silence of a browser. Browsers open connections in
/// advance, on which they send nothing.
const MAX_HEAD: usize = 16 << 10;
const SILENCE: Duration = Duration::from_millis(500);
/// Longest time for a request's head, also if it arrives byte by byte.
const LONGEST: Duration = Duration::from_secs(2);

/// Listener for one request.
pub(super) struct Handover {
    listener: TcpListener,
    at: SocketAddr,
    /// Path that no web page knows.
    path: String,
}

impl Handover {
    pub(super) fn new() -> Result<Self, Failure> {
        let mut secret = [0_u8; 16];
        getrandom::fill(&mut secret).map_err(Failure::internal)?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        Ok(Self {
            at: listener.local_addr()?,
            listener,
            path: format!("/{}", hex::encode(secret)),
        })
    }

    /// Address to open.
    pub(super) fn url(&self) -> String {
        format!("http://{}{}", self.at, self.path)
    }

    /// Answers one connection, if there is one. Returns whether a browser was sent to `link`, or to
    /// `open` if the system does not tell whose browser it is.
    pub(super) fn answer(&self, link: &str, open: &str) -> bool {
        let Ok((stream, peer)) = self.listener.accept() else {
            return false;
        };
        let to = match user_of(peer, self.at) {
            Some(user) if user.is_owner => link,
            Some(_) => return false,
            None => open,
        };
        self.redirect(stream, to).unwrap_or(false)
    }

    fn redirect(&self, mut stream: TcpStream, to: &str) -> io::Result<bool> {
        stream.set_nonblocking(false)?;
        stream.set_write_timeout(Some(SILENCE))?;
        let mut head = Vec::new();
        let mut part = [0; 1024];
        let deadline = Instant::now() + LONGEST;
        while !head.windows(4).any(|end| end == b"\r\n\r\n") {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            stream.set_read_timeout(Some(left.min(SILENCE)))?;
            let read = stream.read(&mut part)?;
            if read == 0 || head.len() > MAX_HEAD {
                return Ok(false);
            }
            head.extend(part.iter().take(read));
        }
        let wanted = format!("GET {} HTTP/1.1\r\n", self.path);
        let is_it = head.starts_with(wanted.as_bytes());
        let status = match is_it {
            true => Zeroizing::new(format!("303 See Other\r\nLocation: {to}")),
            false => Zeroizing::new("404 Not Found".to_owned()),
        };
        let answer = Zeroizing::new(format!(
            "HTTP/1.1 {}\r\nCache-Control: no-store\r\nReferrer-Policy: no-referrer\r\n\
             Content-Length: 0\r\nConnection: close\r\n\r\n",
            *status
        ));
        stream.write_all(answer.as_bytes())?;
        Ok(is_it)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answer to a request for a path, and whether it handed the link over.
    #[cfg(target_os = "linux")]
    fn get(handover: &Handover, path: &str) -> (String, bool) {
        handover.listener.set_nonblocking(false).unwrap();
        let mut browser = TcpStream::connect(handover.at).unwrap();
        write!(
            browser,
            "GET {path} HTTP/1.1\r\nHost: {}\r\n\r\n",
            handover.at
        )
        .unwrap();
        let done = handover.answer("http://127.0.0.1:7602/#key=abc", "http://127.0.0.1:7602/");
        let mut answer = String::new();
        browser.read_to_string(&mut answer).unwrap();
        (answer, done)
    }

    #[test]
    // Other systems do not name the user of a connection.
    #[cfg(target_os = "linux")]
    fn a_browser_of_this_user_is_sent_to_the_link_and_other_paths_lead_nowhere() {
        let handover = Handover::new().unwrap();
        let (answer, done) = get(&handover, "/favicon.ico");
        assert!(!done && answer.starts_with("HTTP/1.1 404 "), "{answer}");
        let (answer, done) = get(&handover, &handover.path);
        assert!(done && answer.starts_with("HTTP/1.1 303 "), "{answer}");
        let location = "\r\nLocation: http://127.0.0.1:7602/#key=abc\r\n";
        assert!(answer.contains(location), "{answer}");
        assert!(!handover.url().contains("key"));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_request_that_arrives_byte_by_byte_ends() {
        let handover = Handover::new().unwrap();
        handover.listener.set_nonblocking(false).unwrap();
        let mut slow = TcpStream::connect(handover.at).unwrap();
        // Until the other side has closed the connection.
        let writer = std::thread::spawn(move || {
            while slow.write_all(b"x").is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        assert!(!handover.answer("link", "link"));
        writer.join().unwrap();
    }

    #[test]
    fn a_connection_without_a_request_ends_soon() {
        let handover = Handover::new().unwrap();
        let _silent = TcpStream::connect(handover.at).unwrap();
        assert!(!handover.answer("link", "link"));
    }
}
