from burnish.cli.main import main

main()
