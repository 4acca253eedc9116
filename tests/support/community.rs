//! Community on this machine: a founder, members, no multicast.

use super::{Home, Server, model};

/// Settings of every node.
const ALONE: [&str; 6] = [
    "--set",
    "policy.research.enable=true",
    "--set",
    "discovery.mdns=false",
    // Every daemon has an HTTP interface.
    "--set",
    "http.listen=127.0.0.1:0",
];

/// Founds a community with research enabled.
pub(crate) fn found(founder: &Home) {
    let create = ["community", "create", "Elm Street", "--research", "on"];
    founder.json(&[&create[..], &["--json"]].concat());
}

/// Founder and its running node, with extra settings.
pub(crate) fn founded(settings: &[&str]) -> (Home, Server) {
    let founder = Home::new();
    found(&founder);
    let node = serve(&founder, settings);
    (founder, node)
}

/// `hearthnet serve` of a member, with its HTTP interface at a free port.
pub(crate) fn serve(home: &Home, settings: &[&str]) -> Server {
    let model = model();
    let command = ["serve", "--model", model, "--http", "127.0.0.1:0"];
    start(home, settings, &command)
}

/// Address where a node listens for others.
pub(crate) fn address(server: &Server) -> &str {
    server.ready["addresses"][0].as_str().expect("an address")
}

/// New trusted member, admitted by the founder's running node.
pub(crate) fn join(founder: &Home, node: &Server) -> Home {
    join_as("trusted", founder, node)
}

/// New member of a level.
pub(crate) fn join_as(level: &str, founder: &Home, node: &Server) -> Home {
    let member = Home::new();
    let invite = founder.json(&["community", "invite", "--level", level, "--json"]);
    let code = invite["code"].as_str().expect("a code");
    let peers = peers(node);
    member.says(&[&ALONE[..], &["--set", &peers, "community", "join", code]].concat());
    member
}

/// `hearthnet shard serve` of a member that knows the founder's running node.
pub(crate) fn host(member: &Home, node: &Server, layers: &str) -> Server {
    host_with(member, node, &[], layers)
}

/// `hearthnet shard serve` with extra settings.
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

/// Setting that names the founder's running node.
pub(crate) fn peers(node: &Server) -> String {
    format!("discovery.static_peers=[\"{}\"]", address(node))
}

fn start(home: &Home, settings: &[&str], command: &[&str]) -> Server {
    let tail = ["--listen", "127.0.0.1:0", "--json", "--lifeline"];
    Server::start(home, &[&ALONE[..], settings, command, &tail[..]].concat())
}
