//! Virtual LAN: hosts in network namespaces on bridges, with real multicast, cables that can be
//! pulled, and limited bandwidth.
//!
//! ```text
//!   host 0            host 1            host 2         each in a namespace of its own
//!   eth0 10.77.0.10   eth0 10.77.0.11   eth0 10.77.0.12     (and fd77::10, ...)
//!     |                 |                 |
//!   port p0-0         port p1-0         port p2-0
//!   ============ bridge br0, in the hub's namespace ============
//! ```
//!
//! The hub is a namespace too, so the lab neither touches nor reaches this machine's own network.
//! All names contain the test's process id. Dropping the lab removes everything; the remains of a
//! killed test are removed by the next lab.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Command, Stdio, id};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, JoinHandle};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Name prefix of all labs.
const PREFIX: &str = "hearthlab-";
/// Hosts per lab: their addresses end in 10 to 109.
const MAX_HOSTS: usize = 100;
/// Folder of `ip netns`.
const NAMESPACES: &str = "/run/netns";

/// Why this machine cannot run a lab.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Unavailable(String);

/// Hosts on one or more networks; each host is on every network.
#[derive(Debug)]
pub struct Lab {
    hub: String,
    hosts: Vec<Host>,
}

/// Host of a lab.
#[derive(Debug, Clone)]
pub struct Host {
    namespace: String,
    hub: String,
    index: usize,
}

impl Lab {
    /// Makes `hosts` hosts on one network.
    ///
    /// # Errors
    /// [`Unavailable`] with the reason. A lab requires root, the `ip` program, and a kernel with
    /// namespaces, bridges and virtual cables.
    pub fn new(hosts: usize) -> Result<Self, Unavailable> {
        Self::with_networks(hosts, 1)
    }

    /// Makes `hosts` hosts on `networks` networks: `eth0` on the first, `eth1` on the second.
    ///
    /// # Errors
    /// As [`Lab::new`].
    ///
    /// # Panics
    /// If there are more than 100 hosts, or more than 10 networks.
    pub fn with_networks(hosts: usize, networks: usize) -> Result<Self, Unavailable> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        assert!(hosts <= MAX_HOSTS && networks <= 10, "a small network");
        sweep();
        let name = format!("{PREFIX}{}-{}", id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let hub = format!("{name}-hub");
        let host = |index| Host {
            namespace: format!("{name}-h{index}"),
            hub: hub.clone(),
            index,
        };
        // If a later step fails, dropping `lab` removes all that was made.
        let lab = Self {
            hub: hub.clone(),
            hosts: (0..hosts).map(host).collect(),
        };
        ip(&format!("netns add {hub}"))?;
        for network in 0..networks {
            let bridge = format!("br{network}");
            // With snooping, a bridge without a router drops IPv6 multicast.
            ip(&format!(
                "-n {hub} link add {bridge} type bridge mcast_snooping 0"
            ))?;
            ip(&format!("-n {hub} link set {bridge} up"))?;
        }
        for host in &lab.hosts {
            host.make(networks)?;
        }
        Ok(lab)
    }

    /// Same as [`Lab::with_networks`]. If no lab is possible, prints the reason and that the test
    /// is skipped.
    ///
    /// # Panics
    /// If no lab is possible and `HEARTHNET_REQUIRE_LAB` is set.
    pub fn or_skip(hosts: usize, networks: usize) -> Option<Self> {
        match Self::with_networks(hosts, networks) {
            Ok(lab) => Some(lab),
            Err(why) => {
                assert!(
                    std::env::var_os("HEARTHNET_REQUIRE_LAB").is_none(),
                    "no network of namespaces: {why}"
                );
                #[allow(clippy::print_stderr, reason = "a skipped test says so")]
                {
                    eprintln!("SKIPPED: this machine has no network of namespaces: {why}");
                }
                None
            }
        }
    }

    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// # Panics
    /// If `index` is out of range.
    pub fn host(&self, index: usize) -> &Host {
        self.hosts.get(index).expect("a host of this lab")
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for host in &self.hosts {
            remove(&host.namespace);
        }
        remove(&self.hub);
    }
}

impl Host {
    fn make(&self, networks: usize) -> Result<(), Unavailable> {
        let (me, hub) = (&self.namespace, &self.hub);
        ip(&format!("netns add {me}"))?;
        ip(&format!("-n {me} link set lo up"))?;
        for network in 0..networks {
            let (eth, port) = (format!("eth{network}"), self.port(network));
            ip(&format!(
                "-n {hub} link add {port} type veth peer name {eth} netns {me}"
            ))?;
            // The addresses are unique, so duplicate address detection would only delay them by two
            // seconds. And an IPv6 address stays while a cable is pulled, as an IPv4 address does.
            for (setting, value) in [("accept_dad", 0), ("keep_addr_on_down", 1)] {
                let set = format!("echo {value} > /proc/sys/net/ipv6/conf/{eth}/{setting}");
                run(Command::new("ip").args(["netns", "exec", me, "sh", "-c", &set]))?;
            }
            let (v4, v6) = (self.v4_on(network), self.v6_on(network));
            for address in [format!("{v4}/24"), format!("{v6}/64")] {
                ip(&format!("-n {me} address add {address} dev {eth}"))?;
            }
            ip(&format!("-n {me} link set {eth} up"))?;
            ip(&format!("-n {hub} link set {port} master br{network}"))?;
            ip(&format!("-n {hub} link set {port} up"))?;
        }
        Ok(())
    }

    /// Bridge port of the host's cable.
    fn port(&self, network: usize) -> String {
        format!("p{}-{network}", self.index)
    }

    /// IPv4 address on the first network.
    pub fn v4(&self) -> Ipv4Addr {
        self.v4_on(0)
    }

    /// IPv4 address on a network: `10.77.NETWORK.10` and up.
    pub fn v4_on(&self, network: usize) -> Ipv4Addr {
        Ipv4Addr::new(10, 77, network as u8, 10 + self.index as u8)
    }

    /// IPv6 address on a network: `fd77:0:0:NETWORK::10` and up. Its last two digits are the
    /// decimal digits of the IPv4 address.
    pub fn v6_on(&self, network: usize) -> Ipv6Addr {
        let last = format!("{}", 10 + self.index);
        let last = u16::from_str_radix(&last, 16).expect("decimal digits are hex digits");
        Ipv6Addr::new(0xfd77, 0, 0, network as u16, 0, 0, 0, last)
    }

    /// Command that runs `program` on this host. The child process is the program itself, so
    /// killing the child ends the program.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &self.namespace])
            .arg(program);
        command
    }

    /// Runs a function on this host, in a thread. Threads that it starts run there too.
    ///
    /// # Panics
    /// The thread panics if the lab is gone.
    pub fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let path = PathBuf::from(NAMESPACES).join(&self.namespace);
        thread::spawn(move || {
            let namespace = File::open(path).expect("the lab is there");
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
                .expect("the right to enter a namespace that we made");
            work()
        })
    }

    /// Pulls the cable out of the bridge. The host loses its carrier and keeps its addresses.
    ///
    /// # Panics
    /// If `ip` fails.
    pub fn unplug(&self, network: usize) {
        self.set_port(network, "down");
    }

    /// Puts the cable back.
    ///
    /// # Panics
    /// If `ip` fails.
    pub fn plug(&self, network: usize) {
        self.set_port(network, "up");
    }

    /// Stops or resumes the bridge's forwarding for this host. The host's carrier stays up, as on a
    /// switch that looks for loops before it forwards.
    ///
    /// # Panics
    /// If `bridge` fails.
    pub fn forwarded(&self, network: usize, forwarded: bool) {
        let state = if forwarded { "forwarding" } else { "disabled" };
        let (hub, port) = (&self.hub, self.port(network));
        must(call(
            "bridge",
            &format!("-n {hub} link set dev {port} state {state}"),
        ));
    }

    fn set_port(&self, network: usize, state: &str) {
        let (hub, port) = (&self.hub, self.port(network));
        must(ip(&format!("-n {hub} link set {port} {state}")));
    }

    /// Adds an address such as `10.77.0.200/24` to the host, or removes it.
    ///
    /// # Panics
    /// If `ip` fails.
    pub fn address(&self, network: usize, address: &str, present: bool) {
        let (me, verb) = (&self.namespace, if present { "add" } else { "del" });
        must(ip(&format!(
            "-n {me} address {verb} {address} dev eth{network}"
        )));
    }

    /// Limits each direction of the host's cable to `mbit` million bits per second.
    ///
    /// # Panics
    /// If `tc` fails.
    pub fn bandwidth(&self, network: usize, mbit: u32) {
        let (eth, port) = (format!("eth{network}"), self.port(network));
        for (namespace, device) in [(&self.namespace, &eth), (&self.hub, &port)] {
            let bucket = format!("tbf rate {mbit}mbit burst 32kb latency 50ms");
            let args = format!("-n {namespace} qdisc replace dev {device} root {bucket}");
            must(call("tc", &args));
        }
    }
}

fn must(done: Result<(), Unavailable>) {
    done.unwrap_or_else(|why| panic!("{why}"));
}

fn ip(args: &str) -> Result<(), Unavailable> {
    call("ip", args)
}

/// Runs a program; its arguments must not contain spaces.
fn call(program: &str, args: &str) -> Result<(), Unavailable> {
    run(Command::new(program).args(args.split(' ')))
}

fn run(command: &mut Command) -> Result<(), Unavailable> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|error| Unavailable(format!("{command:?}: {error}")))?;
    if output.status.success() {
        return Ok(());
    }
    let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(Unavailable(format!("{command:?}: {why}")))
}

/// Kills the processes in a namespace, and removes it.
fn remove(namespace: &str) {
    if !PathBuf::from(NAMESPACES).join(namespace).exists() {
        return;
    }
    if let Ok(found) = Command::new("ip")
        .args(["netns", "pids", namespace])
        .output()
    {
        let own = id();
        for pid in String::from_utf8_lossy(&found.stdout)
            .split_whitespace()
            .filter_map(|pid| pid.parse::<u32>().ok())
            .filter(|pid| *pid != own)
            .filter_map(|pid| rustix::process::Pid::from_raw(pid as i32))
        {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
    let _ = ip(&format!("netns del {namespace}"));
}

/// Removes the labs of test processes that have ended.
fn sweep() {
    let Ok(entries) = fs::read_dir(NAMESPACES) else {
        return;
    };
    for name in entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()) {
        let owner = name
            .strip_prefix(PREFIX)
            .and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        if owner.is_some_and(|pid| !PathBuf::from(format!("/proc/{pid}")).exists()) {
            remove(&name);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    #[test]
    fn hosts_reach_each_other_until_the_cable_is_pulled_and_the_lab_is_removed() {
        let Some(lab) = Lab::or_skip(2, 2) else {
            return;
        };
        let names: Vec<_> = lab
            .hosts()
            .iter()
            .map(|host| host.namespace.clone())
            .collect();
        let there = |name: &str| PathBuf::from(NAMESPACES).join(name).exists();
        assert!(names.iter().all(|name| there(name)));
        // The connection needs no program on the machine but this one.
        let listen = |network: usize| {
            let address = lab.host(1).v4_on(network);
            lab.host(1)
                .run(move || std::net::TcpListener::bind((address, 0)).expect("its own address"))
                .join()
                .expect("a listener")
        };
        let (first, second) = (listen(0), listen(1));
        let connects = |to: &std::net::TcpListener| {
            let to = to.local_addr().expect("bound");
            let wait = std::time::Duration::from_millis(300);
            let connect = move || std::net::TcpStream::connect_timeout(&to, wait).is_ok();
            lab.host(0).run(connect).join().expect("an answer")
        };
        assert!(connects(&first) && connects(&second));
        lab.host(1).unplug(0);
        assert!(!connects(&first) && connects(&second));
        lab.host(1).plug(0);
        lab.host(1).bandwidth(0, 100);
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while !connects(&first) {
            assert!(
                std::time::Instant::now() < deadline,
                "the cable is in again"
            );
        }
        let mut sleeper = lab
            .host(0)
            .command("sh")
            .args(["-c", "echo; exec sleep 1000"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("sleep starts");
        // `ip` starts at once, and joins the host's namespace a moment later.
        let mut said = sleeper.stdout.take().expect("a pipe");
        said.read_exact(&mut [0]).expect("it is there");
        drop(lab);
        assert!(!sleeper.wait().expect("it ended").success());
        assert!(!names.iter().any(|name| there(name)));
    }
}
