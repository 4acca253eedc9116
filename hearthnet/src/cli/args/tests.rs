use super::*;

#[test]
fn the_command_line_is_consistent() {
    Args::command().debug_assert();
}

#[test]
fn a_setting_counts_before_and_after_the_subcommand() {
    let line = "hearthnet --set a=1 config --set=b=2 show --set c=--set";
    let (args, _) = Args::read(line.split(' ').map(OsString::from)).unwrap();
    assert_eq!(args.global.set, ["a=1", "b=2", "c=--set"]);
    let line = "hearthnet chat --set a=1 -- --set";
    let (args, _) = Args::read(line.split(' ').map(OsString::from)).unwrap();
    assert_eq!(args.global.set, ["a=1"]);
}
