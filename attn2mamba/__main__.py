from attn2mamba_cli import main

main()
