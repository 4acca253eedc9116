//! A community on this machine: a founder, members, no multicast.

use super::{Home, Server, model};

/// What every node here is started with.
const ALONE: [&str; 6] = [
    "--set",
    "policy.research.enable=true",
    "--set",
    "discovery.mdns=false",
    // Every daemon has an HTTP door.
    "--set",
    "http.listen=127.0.0.1:0",
];

/// Founds a community that computes together.
pub(crate) fn found(founder: &Home) {
    let create = ["community", "create", "Elm Street", "--research", "on"];
    founder.json(&[&create[..], &["--json"]].concat());
}

/// A founder, and its running node, with settings of its own.
pub(crate) fn founded(settings: &[&str]) -> (Home, Server) {
    let founder = Home::new();
    found(&founder);
    let node = serve(&founder, settings);
    (founder, node)
}

/// `hearthnet serve` of a member, with its HTTP door at a free port.
pub(crate) fn serve(home: &Home, settings: &[&str]) -> Server {
    let model = model();
    let command = ["serve", "--model", model, "--http", "127.0.0.1:0"];
    start(home, settings, &command)
}

/// Where a node listens for others.
pub(crate) fn address(server: &Server) -> &str {
    server.ready["addresses"][0].as_str().expect("an address")
}

/// A new trusted member, admitted by the founder's running node.
pub(crate) fn join(founder: &Home, node: &Server) -> Home {
    join_as("trusted", founder, node)
}

/// A new member of a level.
pub(crate) fn join_as(level: &str, founder: &Home, node: &Server) -> Home {
    let member = Home::new();
    let invite = founder.json(&["community", "invite", "--level", level, "--json"]);
    let code = invite["code"].as_str().expect("a code");
    let peers = peers(node);
    member.says(&[&ALONE[..], &["--set", &peers, "community", "join", code]].concat());
    member
}

/// `hearthnet shard serve` of a member who knows the founder's running node.
pub(crate) fn host(member: &Home, node: &Server, layers: &str) -> Server {
    host_with(member, node, &[], layers)
}

/// The same with settings of its own.
pub(crate) fn host_with(member: &Home, node: &Server, settings: &[&str], layers: &str) -> Server {
    let model = model();
    let peers = peers(node);
    let command = ["shard", "serve", "--model", model, "--layers", layers];
    start(
        member,
        &[&["--set", &peers], settings].concat(),
        &[&command[..], &["--threads", "1"]].concat(),
    )
}

/// The setting with which the founder's running node is found.
pub(crate) fn peers(node: &Server) -> String {
    format!("discovery.static_peers=[\"{}\"]", address(node))
}

fn start(home: &Home, settings: &[&str], command: &[&str]) -> Server {
    let tail = ["--listen", "127.0.0.1:0", "--json", "--lifeline"];
    Server::start(home, &[&ALONE[..], settings, command, &tail[..]].concat())
}
