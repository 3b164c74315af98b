"""The provider of `infra.provider` with boto3. Functions take the client first and keywords after it."""
